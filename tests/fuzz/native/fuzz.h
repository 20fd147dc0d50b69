/* fuzz.h: what a harness provides to the driver. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>

#define FUZZ_INPUT_MAX 4096u

/* Runs the parser with these bytes. A finding ends the program (a sanitizer, or abort). The name is libFuzzer's. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Words of the format, which mutations insert. The last is NULL. */
extern const char *const fuzz_words[];

#endif
