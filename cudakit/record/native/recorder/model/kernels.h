/* Kernel arguments: the parameter offsets at which a pointer may be stored, and the arguments that are pointers. */
#ifndef CK_KERNELS_H
#define CK_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "decode/tensor_maps.h"
#include "model/allocations.h"
#include "vendor/sanitizer_api.h"
#include "write/record.h"

#define MAX_ACCESSES \
    512 /* maximum number of accesses of a launch; a fused optimizer step has a few hundred tensors */

struct kernel_layout;

/* The launch that this thread has entered: the arguments of cuLaunchKernel. */
typedef struct {
    CUfunction function;
    void **parameters, **extra;
    const struct kernel_layout *layout;
} entered_launch;

extern __thread entered_launch this_launch;

/* The arguments of a launch: different pointers in the order of the arguments, and the memory that they reach. */
typedef struct {
    uint64_t pointers[MAX_ACCESSES];
    uint64_t allocation_ends[MAX_ACCESSES]; /* first address behind the allocation that a pointer reaches */
    uint8_t certainties[MAX_ACCESSES];      /* PRECISION_* of the access through a pointer */
    size_t pointer_count;
    allocation *allocations[MAX_ACCESSES];        /* valid while the recorder lock is held */
    uint8_t allocation_certainties[MAX_ACCESSES]; /* lowest PRECISION_* of the pointers into an allocation */
    size_t allocation_count;
    uint64_t pointer_hash;  /* hash of the pointers */
    uint64_t distance_hash; /* hash of the distances of the pointers to the first one */
    uint64_t pattern_hash;  /* hash of the positions of equal pointers, and of the alignment of each pointer */
    uint64_t scalar_hash;   /* hash of all other arguments */
    bool is_complete;       /* all arguments are known, and all pointers are listed */
} launch_arguments;

/* Return the parameter layout of a kernel, or NULL. The driver is queried once per kernel. Calls CUDA: the recorder
 * lock is not held. */
const struct kernel_layout *kernels_layout(CUfunction function);

/* Return the name of a kernel, or NULL. Calls CUDA: the recorder lock is not held. */
const char *kernels_name(CUfunction function);

/* Find the kernel arguments that point into live allocations, at most MAX_ACCESSES. ``parameters`` is the array passed
 * to cuLaunchKernel, ``extra`` its packed form; one of them is NULL. The recorder lock is held. */
void kernels_find_arguments(const struct kernel_layout *layout, void **parameters, void **extra,
                            launch_arguments *arguments);

/* Return the arguments of the kernel that this thread launches in its current driver call. The result is valid until the
 * recorder lock is released. The recorder lock is held. */
const launch_arguments *kernels_arguments_of_launch(void);

/* Return a hash of all arguments; 0 if some are unknown. */
uint64_t kernels_hash_arguments(const launch_arguments *arguments);

/* Write one ACCESS record for each pointer, based on ``launch_record``, and return the number of records. */
size_t kernels_write_accesses(const launch_arguments *arguments, const record *launch_record, record *accesses);

/* Write the pointers to TEMPLATE_POINTERS records, based on ``launch_record``, and return the number of records. */
size_t kernels_write_pointers(const uint64_t *pointers, size_t pointer_count, const record *launch_record,
                              record *pointer_records);

/* Add the tensor maps among the parameters of a kernel. Return false if there are none, or no memory is left. The
 * recorder lock is held. */
bool kernels_add_tensor_maps(tma_store_set *set, uint32_t launch, uint8_t mode, const struct kernel_layout *layout,
                             void **parameters, void **extra);

/* Return the string id of the name of a kernel. The recorder lock is held. */
uint32_t kernels_name_id(CUfunction function, const char *name);

/* Forget all function handles: a module is about to be unloaded, and the driver may reuse its handles. The recorder lock
 * is held. */
void kernels_clear(void);

#endif
