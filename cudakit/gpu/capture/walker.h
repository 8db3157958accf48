/* How the recorder asks for the Python stack of the thread that it runs on, without the GIL.
 *
 * The recorder is built once for all versions of CPython, and what reads the frames once for each:
 * they meet in this struct, whose address `_frames.walker` is. Both functions may be called on any
 * thread at any time, also with the GIL held; they allocate nothing and take no reference.
 */

#ifndef CUDAKIT_WALKER_H
#define CUDAKIT_WALKER_H

#include <stdint.h>

struct ck_frame {
    char function[256]; /* its qualified name; UTF-8, ended by a zero, cut at a character */
    char file[512];
    int32_t line; /* 0 where the instruction belongs to none */
};

struct ck_walker {
    /* Fills what the frames of this thread execute, the innermost first, and returns how many it
     * filled: 0 on a thread without Python. A key stands for a code object and an instruction in it,
     * and is never 0; a code object made where another one was has other keys. */
    int (*walk)(uint64_t *keys, uint64_t *code, uint64_t *offset, int limit);

    /* Says in words what `walk` filled, before the call returns in which it did: until then the
     * frames keep the code alive. Returns 0, or -1 where `code` is 0. */
    int (*resolve)(uint64_t code, uint64_t offset, struct ck_frame *out);
};

#endif
