/* json_text.h: reads single values out of JSON text, without a tree. */
#ifndef VGPU_RUNTIME_JSON_TEXT_H
#define VGPU_RUNTIME_JSON_TEXT_H

#include <stddef.h>

/* Where the value of `key` begins in the object that begins at `text`; NULL where there is no such key,
 * or where the text is not JSON up to there. Of a key that is there twice, the last, as Go has it.
 * `text` ends with a zero byte. */
const char *vgpu_json_member(const char *text, const char *key);

/* Where the first element of the array that begins at `text` begins, and the one after the element at `element`.
 * NULL where there is none. */
const char *vgpu_json_first(const char *text);
const char *vgpu_json_next(const char *element);

/* The string that begins at `value`, decoded, in `out`. Its length; -1 where there is no string, where it
 * holds a zero byte, or where it and its final zero byte need more than `room`. */
long vgpu_json_string(const char *value, char *out, size_t room);

/* The integer at `value`; -1 where there is none, or a negative one. */
long vgpu_json_integer(const char *value);

#endif
