#include "refuse.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void put_json_text(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            fprintf(out, "\\%c", c);
        else if (c < 0x20)
            fprintf(out, "\\u%04x", c);
        else
            fputc(c, out);
    }
}

static void append_log(const struct vgpu_log *log, const char *text)
{
    int fd = open(log->path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    FILE *out = fd < 0 ? NULL : fdopen(fd, "a");
    char when[32];
    time_t now = time(NULL);
    struct tm utc;
    if (out == NULL) {
        if (fd >= 0)
            close(fd);
        return;
    }
    strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    fprintf(out, log->json ? "{\"level\":\"error\",\"msg\":\"" : "time=\"%s\" level=error msg=\"", when);
    put_json_text(out, log->program);
    fputs(": ", out);
    put_json_text(out, text);
    fprintf(out, log->json ? "\",\"time\":\"%s\"}\n" : "\"\n", when);
    fclose(out);
}

void vgpu_refuse(const struct vgpu_log *log, const char *text)
{
    fprintf(stderr, "%s: %s\n", log->program, text);
    if (log->path != NULL)
        append_log(log, text);
}

void vgpu_refuse_absent(const struct vgpu_log *log, const char *run_dir)
{
    char text[512];
    if (errno == EACCES || errno == EPERM)
        snprintf(text, sizeof(text),
                 "uid %u may not open %s/runtime.sock: %s (E201)\nhint: for users, [runtime] users = true in the "
                 "policy, and membership in group vgpu: usermod -aG vgpu USER",
                 (unsigned)geteuid(), run_dir, strerror(errno));
    else
        snprintf(text, sizeof(text),
                 "vgpud does not answer at %s/runtime.sock: %s (E801)\nhint: see if it runs: systemctl status vgpud",
                 run_dir, strerror(errno));
    vgpu_refuse(log, text);
}
