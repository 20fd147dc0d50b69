/* fuzz_json.c: how vgpu-hook and vgpu-runtime read an OCI runtime's state and a container's config.json. */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "json_text.h"

const char *const fuzz_words[] = {"{",
                                  "}",
                                  "[",
                                  "]",
                                  ":",
                                  ",",
                                  "\"",
                                  "\\",
                                  "\\u",
                                  "\\ud83d\\ude00",
                                  "\\u0000",
                                  "\"pid\":",
                                  "\"bundle\":",
                                  "\"root\":{\"path\":",
                                  "18446744073709551616",
                                  NULL};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const keys[] = {"pid", "bundle", "root", "path"};
    char *text = malloc(size + 1);
    if (text == NULL)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    for (size_t k = 0; k < sizeof(keys) / sizeof(keys[0]); k++) {
        const char *value = vgpu_json_member(text, keys[k]);
        if (value == NULL)
            continue;
        if (value < text || value > text + size)
            abort();
        /* buffers of several sizes on the heap, where the sanitizer sees a write beyond the end */
        for (size_t room = 1; room <= 4096; room *= 8) {
            char *out = malloc(room);
            long length = out == NULL ? -1 : vgpu_json_string(value, out, room);
            if (length >= (long)room || (length >= 0 && strlen(out) != (size_t)length))
                abort();
            free(out);
        }
        if (vgpu_json_integer(value) < -1)
            abort();
        const char *inner = vgpu_json_member(value, "path");
        if (inner != NULL && (inner < value || inner > text + size))
            abort();
    }
    free(text);
    return 0;
}
