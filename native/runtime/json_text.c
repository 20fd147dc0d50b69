#include "json_text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 512, KEY_MAX = 256 };

static const char *past_space(const char *at)
{
    return at + strspn(at, " \t\r\n");
}

/* Returns the position after the end of the string that begins at `at`; NULL if the string has no end. */
static const char *past_string(const char *at)
{
    for (at++; *at != '"'; at++) {
        if (*at == '\\')
            at++;
        if (*at == '\0')
            return NULL;
    }
    return at + 1;
}

/*
 * Returns the position after a value; NULL if the value has no end or is nested too deep. Only brackets and strings are
 * parsed.
 */
static const char *past_value(const char *at)
{
    int depth = 0;
    at = past_space(at);
    if (*at != '{' && *at != '[' && *at != '"') {
        const char *end = at + strcspn(at, ",]} \t\r\n");
        return end == at ? NULL : end;
    }
    do {
        if (*at == '"') {
            at = past_string(at);
            if (at == NULL)
                return NULL;
            continue;
        }
        depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
        if (*at == '\0' || depth > DEPTH_MAX)
            return NULL;
        at++;
    } while (depth > 0);
    return at;
}

const char *vgpu_json_member(const char *text, const char *key)
{
    char name[KEY_MAX];
    const char *found = NULL;
    const char *at = past_space(text);
    if (*at != '{')
        return NULL;
    at = past_space(at + 1);
    while (*at == '"') {
        long length = vgpu_json_string(at, name, sizeof(name));
        at = past_string(at);
        if (at == NULL)
            return NULL;
        at = past_space(at);
        if (*at != ':')
            return NULL;
        at = past_space(at + 1);
        if (length >= 0 && strcmp(name, key) == 0)
            found = at;
        at = past_value(at);
        if (at == NULL)
            return NULL;
        at = past_space(at);
        if (*at != ',')
            break;
        at = past_space(at + 1);
    }
    return *at == '}' ? found : NULL;
}

const char *vgpu_json_first(const char *text)
{
    const char *at = past_space(text);
    if (*at != '[')
        return NULL;
    at = past_space(at + 1);
    return *at == ']' || *at == '\0' ? NULL : at;
}

const char *vgpu_json_next(const char *element)
{
    const char *at = past_value(element);
    if (at == NULL)
        return NULL;
    at = past_space(at);
    return *at == ',' ? past_space(at + 1) : NULL;
}

/* Returns the value of four hexadecimal digits; -1 for any other text. */
static long hex4(const char *at)
{
    char digits[5] = {0};
    if (strspn(at, "0123456789abcdefABCDEF") < 4)
        return -1;
    memcpy(digits, at, 4);
    return strtol(digits, NULL, 16);
}

/*
 * Returns the code point after "\u", including the second half of a surrogate pair, and moves `at` behind it. Returns
 * -1 for any other text.
 */
static long code_point(const char **at)
{
    long high = hex4(*at);
    *at += high < 0 ? 0 : 4;
    if (high < 0xD800 || high > 0xDBFF || (*at)[0] != '\\' || (*at)[1] != 'u')
        return high;
    long low = hex4(*at + 2);
    if (low < 0xDC00 || low > 0xDFFF)
        return -1;
    *at += 6;
    return 0x10000 + ((high - 0xD800) << 10 | (low - 0xDC00));
}

static size_t put_utf8(long point, char out[4])
{
    if (point < 0x80) {
        out[0] = (char)point;
        return 1;
    }
    size_t more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    static const int lead[] = {0, 0xC0, 0xE0, 0xF0};
    for (size_t i = more; i > 0; i--, point >>= 6)
        out[i] = (char)(0x80 | (point & 0x3F));
    out[0] = (char)(lead[more] | point);
    return more + 1;
}

/*
 * Decodes the character after a backslash into `out`. Returns its number of bytes, or 0 if JSON does not have this
 * escape.
 */
static size_t unescape(const char **at, char out[4])
{
    static const char names[] = "\"\\/bfnrt";
    static const char values[] = "\"\\/\b\f\n\r\t";
    const char *name = **at == '\0' ? NULL : strchr(names, **at);
    if (name != NULL) {
        (*at)++;
        out[0] = values[name - names];
        return 1;
    }
    if (**at != 'u')
        return 0;
    (*at)++;
    long point = code_point(at);
    return point <= 0 ? 0 : put_utf8(point, out);
}

long vgpu_json_string(const char *value, char *out, size_t room)
{
    size_t length = 0;
    const char *at = past_space(value);
    if (*at++ != '"')
        return -1;
    while (*at != '"') {
        char bytes[4] = {*at};
        size_t count = 1;
        if (*at == '\0')
            return -1;
        at++;
        if (bytes[0] == '\\')
            count = unescape(&at, bytes);
        if (count == 0 || length + count >= room)
            return -1;
        memcpy(out + length, bytes, count);
        length += count;
    }
    out[length] = '\0';
    return (long)length;
}

long vgpu_json_integer(const char *value)
{
    char *end = NULL;
    errno = 0;
    long number = strtol(past_space(value), &end, 10);
    return errno != 0 || end == value || number < 0 || strchr(",]} \t\r\n", *end) == NULL ? -1 : number;
}
