/* Templates: accesses that are known from earlier launches, so that a launch need not be recorded.
 *
 * Two launches have the same signature if they launch the same kernel with the same grid and block, and the same
 * arguments are equal pointers; or if they launch the same executable graph. Accesses are compared relative to the
 * pointers: each accessed byte belongs to the nearest pointer at or below it in its allocation. If two launches of a
 * signature had equal accesses, these accesses become the template of the signature. The template applies to launches
 * with the same pointers, and, after launches with two other sets of pointers confirmed it, to all launches of the
 * signature. The trace names the template instead of the accesses of such a launch.
 *
 * Whether a launch may use its template also depends on its order with earlier work on the allocations that its
 * pointers reach: see memory_order and serves_order() in templates.c. Some of the launches that may use a template
 * are recorded to verify the template: often at first, then rarely. A signature whose accesses change, or that
 * accesses memory outside of the allocations, is always recorded.
 *
 * Callers hold the recorder lock. */
#ifndef CK_TEMPLATES_H
#define CK_TEMPLATES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "exact/access_digest.h"

/* The arguments of a launch by which templates are chosen. */
typedef struct {
    uint64_t key;           /* hash of kernel, grid, block and positions of equal pointers; 0: no template */
    uint64_t scalar_hash;   /* hash of the arguments that are not pointers */
    uint64_t pointer_hash;  /* hash of the pointers */
    uint64_t distance_hash; /* hash of the distances in bytes between the pointers */
} launch_hashes;

/* The order of a launch and earlier work on the memory that it reaches. */
typedef enum {
    MEMORY_ORDERED,   /* the launch is ordered after all earlier work on the allocations */
    MEMORY_SHARED,    /* the launch is ordered after all earlier accesses to the bytes of its footprint */
    MEMORY_UNORDERED, /* unordered work accesses bytes of the footprint, or the footprint is unknown */
    MEMORY_CONTESTED  /* the order of some work on the allocations is unknown */
} memory_order;

/* The signature of a launch that is recorded. */
typedef struct {
    launch_hashes hashes;
    uint32_t state_index; /* index of the signature's state; 0: the accesses of the launch are not compared */
    uint32_t generation;  /* number of times that all templates had been forgotten before the launch */
    bool is_check;        /* whether the launch is recorded only to verify its template */
    memory_order order;   /* order of the launch and earlier work, if a template applies to the launch */
} launch_signature;

/* A template that applies to a launch. */
typedef struct {
    uint32_t id;      /* 0: the launch must be recorded */
    bool is_relative; /* whether the template comes from a launch with other pointers */
    /* Whether the accesses are contiguous from the pointers on, and were checked by a launch whose order was
     * MEMORY_SHARED. */
    bool is_checked;
    bool is_unordered; /* whether the launch should be recorded, but cannot be recorded */
} launch_template;

/* The bytes that the last recorded launch of a signature accessed. */
typedef struct {
    const footprint_range *ranges;
    size_t range_count;
    bool is_assumed; /* whether the next launch may access other bytes, because no template applies to it */
} launch_footprint;

/* The properties of a launch by which templates are chosen, besides its arguments. */
typedef struct {
    uint32_t module, name, context; /* ids of the module, of the kernel's name, and of the context */
    uint32_t grid[3], block[3], cluster[3];
} launch_shape;

/* Return the hashes by which the template of a launch is chosen. The key is 0 if there can be no template. */
launch_hashes templates_hash_launch(const launch_shape *shape, const launch_arguments *arguments);

/* Do the same for a graph, given the hash of its nodes' parameters, which is 0 if some are unknown. Graphs have no
 * arguments: launches of graphs whose nodes have the same parameters have the same signature. ``context`` is an id. */
launch_hashes templates_hash_graph(uint64_t content_hash, uint32_t context);

/* Give all later launches new signatures: a library was unloaded, and its module handles may be reused. The recorder lock
 * is held. */
void templates_renew_signatures(void);

/* Return the signature of a launch. */
launch_signature templates_find_signature(const launch_hashes *hashes);

/* Return whether a template applies to a launch. If the launch ``is_shared``, because unordered work uses the same
 * allocations, the accesses of the template must be contiguous from the pointers on. */
bool templates_apply_to(const launch_signature *signature, bool is_shared);

/* Return the bytes that the last recorded launch of a signature accessed; ``ranges`` is NULL if no launch was
 * recorded. */
launch_footprint templates_footprint(const launch_signature *signature);

/* Return the template of a launch, or one with id 0 if the launch must be recorded. Without ``can_be_recorded``, the
 * template of the launch is not verified. */
launch_template templates_choose(launch_signature *signature, memory_order order, bool can_be_recorded);

/* Return the template of a launch that should be recorded, but cannot be recorded. */
launch_template templates_use_instead(const launch_signature *signature);

/* The result of comparing the accesses of a recorded launch with its template. */
typedef struct {
    uint8_t check_result;     /* result of the check: TEMPLATE_CHECK_* in record.h */
    uint32_t new_template_id; /* id of the new template that the accesses become; 0: none */
} template_result;

/* Compare the accesses of a recorded launch with those of earlier launches. The recorder lock and the reader lock are
 * held. */
template_result templates_compare(const launch_signature *signature, const access_digest *accesses);

/* Forget all templates and signatures, in the child of a fork. */
void templates_clear(void);

#endif
