/* refuse.h: reports why a container is not started, on the runtime's error stream and log. */
#ifndef VGPU_RUNTIME_REFUSE_H
#define VGPU_RUNTIME_REFUSE_H

#include <stdbool.h>

#define VGPU_RUN_DIR "/run/vgpud"
#define VGPU_PATIENCE_S 10.0 /* maximum wait for vgpud, long enough for a usual restart of vgpud */
#define VGPU_ANSWER_S 60

struct vgpu_log {
    const char *program;
    const char *path; /* log file, as runc's --log; NULL: only standard error */
    bool json;        /* the log is in JSON, as runc's --log-format */
};

/* Writes the text to standard error and to the log, in runc's format. A second line of the text is a hint. */
void vgpu_refuse(const struct vgpu_log *log, const char *text);

/* As vgpu_refuse, for a vgpud that did not answer. errno has the reason. */
void vgpu_refuse_absent(const struct vgpu_log *log, const char *run_dir);

#endif
