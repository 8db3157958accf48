/* The device patch: given to every module that is loaded, so that its kernels tell what they access. */
#ifndef CK_PATCHING_H
#define CK_PATCHING_H

#include <stdbool.h>
#include <stddef.h>

#include "sanitizer_api.h"

/* Use a patch for the devices of a compute capability, such as 90. The image is copied; -1 without memory. */
int patching_use(int capability, const void *image, size_t bytes);

/* Whether there is any. */
bool patching_wanted(void);

/* A module was loaded: patch it. Calls CUDA: the lock is not held. */
void patching_module(const Sanitizer_ResourceModuleData *module);

/* A module will be unloaded, a context destroyed. The lock is held. */
void patching_module_gone(CUmodule module);
void patching_context_gone(CUcontext context);

/* Whether the patch is in a context, so that its launches need user data. The lock is held. */
bool patching_is_in(CUcontext context);

/* Why the accesses of a kernel are not all told; NULL where they are. The lock is held. */
const char *patching_lacks(CUmodule module, const char *function);

/* Forget every context and module: they are another process's. */
void patching_clear(void);

#endif
