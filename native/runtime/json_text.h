/* json_text.h: reads single values out of JSON text, without a tree. */
#ifndef VGPU_RUNTIME_JSON_TEXT_H
#define VGPU_RUNTIME_JSON_TEXT_H

#include <stddef.h>

/*
 * Returns the position of the value of `key` in the object at `text`; NULL if there is no such key, or the object is
 * malformed. If a key occurs twice, the last one counts, as in Go. `text` ends with a zero byte.
 */
const char *vgpu_json_member(const char *text, const char *key);

/*
 * Return the position of the first element of the array at `text`, and of the element after `element`; NULL if there is
 * none.
 */
const char *vgpu_json_first(const char *text);
const char *vgpu_json_next(const char *element);

/*
 * Decodes the string at `value` into `out`. Returns its length; -1 if there is no string, if it contains a zero byte or
 * an invalid escape, or if it and a final zero byte need more than `room` bytes.
 */
long vgpu_json_string(const char *value, char *out, size_t room);

/* Returns the integer at `value`; -1 if there is none, or if it is negative. */
long vgpu_json_integer(const char *value);

#endif
