/* The functions that read the Python stack of the calling thread without the GIL.
 *
 * The recorder is built once for all versions of CPython, the frame reader once per version. This struct, whose
 * address is `_frames.walker`, is the interface between them. Both functions may be called on any thread at any
 * time, also with the GIL held; they allocate nothing and take no reference.
 */

#ifndef CUDAKIT_WALKER_H
#define CUDAKIT_WALKER_H

#include <stdint.h>

struct ck_frame {
    char function[256]; /* qualified name of the function: UTF-8, zero-terminated, cut at a character boundary */
    char file[512];     /* file name, encoded like the function name */
    int32_t line;       /* line number; 0 if it is unknown */
};

struct ck_walker {
    /* Read the frames of the calling thread, innermost first, and return their number, which is 0 on a thread
     * without Python. A key identifies a code object and an instruction offset, and is never 0. A code object that
     * reuses the address of a freed one has different keys. */
    int (*walk)(uint64_t *keys, uint64_t *code, uint64_t *offset, int limit);

    /* Look up the names and the line of a frame that ``walk`` returned. The caller must not have returned to Python
     * since ``walk``: only until then do the frames keep the code object alive. Return 0, or -1 if ``code`` is 0. */
    int (*resolve)(uint64_t code, uint64_t offset, struct ck_frame *out);

    /* Return the number of the program call that the calling thread executes, or 0 if it is unknown. Two CUDA calls
     * with the same number were made while the program's own code executed one instruction, such as a call of a
     * library. */
    uint32_t (*program_call)(void);
};

#endif
