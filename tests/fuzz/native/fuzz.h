/* fuzz.h: what a harness gives to the driver. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>

#define FUZZ_INPUT_MAX 4096u

/* Runs the parser on these bytes; a finding ends the program (a sanitizer, or abort). libFuzzer's name. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Words of the format, which mutations insert; the last is NULL. */
extern const char *const fuzz_words[];

#endif
