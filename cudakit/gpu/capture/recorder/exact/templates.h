/* Templates: accesses that are known from earlier launches, so that a launch need not be recorded.
 *
 * Two launches have the same signature if they launch the same kernel with the same grid, the same block and the same
 * pointers, or the same executable graph. After two launches of a signature accessed the same bytes, these accesses
 * are the template of the signature: the trace names the template instead of the accesses of a later launch.
 *
 * A launch is always recorded if operations that are not ordered may access one of the allocations that its pointers
 * reach. So a launch that uses a template is ordered with all earlier operations on this memory, and a race with it can
 * only be that of a later operation. Other launches are recorded to verify their template: often at first, then
 * rarely. A signature whose accesses change, or that accesses memory outside of the allocations, is always recorded.
 *
 * cudakit/core/sanitize/template_policy.py has the same rules, for tests. Callers hold the lock. */
#ifndef CK_TEMPLATES_H
#define CK_TEMPLATES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The signature of a launch that is recorded. */
typedef struct {
    uint32_t state;          /* index of the signature's state; 0: the accesses of the launch are not compared */
    uint32_t generation;     /* number of times that all templates had been forgotten before the launch */
    uint64_t arguments_hash; /* hash of all arguments, which include numbers */
    bool is_check;           /* the launch is recorded only to verify its template */
} launch_signature;

/* Use templates from now on. */
void templates_enable(void);
bool templates_are_enabled(void);

/* Return the id of the template of a launch, or 0 if the launch must be recorded; then set ``signature``. ``key`` is a
 * hash of kernel, grid, block and pointers. If the launch is contested, unordered operations may access its memory. If
 * it cannot be recorded now, its template is not verified. */
uint32_t templates_choose(uint64_t key, uint64_t arguments_hash, bool is_contested, bool can_be_recorded,
                          launch_signature *signature);

/* Return whether a launch with this key and these arguments has a template. */
bool templates_exist(uint64_t key, uint64_t arguments_hash);

/* Return the template of a launch that should be recorded, but cannot be, or 0. */
uint32_t templates_use_instead(const launch_signature *signature);

/* The result of comparing the accesses of a recorded launch with its template, TEMPLATE_CHECK_* in record.h, and the id
 * of the template that they become; 0: none. */
typedef struct {
    uint8_t check;
    uint32_t new_template;
} template_result;

/* Compare the accesses of a recorded launch: ``digest`` is a hash of its ``range_count`` ranges. ``is_inside`` is true
 * if all of them are in allocations that the pointers of the launch reach. */
template_result templates_compare(const launch_signature *signature, uint64_t digest, size_t range_count,
                                  bool is_inside);

/* Forget all templates and signatures, in the child of a fork. */
void templates_clear(void);

#endif
