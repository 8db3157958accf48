#include "exact/templates.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "recorder.h"

/* The size of a template in ranges of 96 bytes, which the analysis keeps in memory: its accesses, and about 1.5 KiB for each
 * template. */
#define TEMPLATE_SIZE(range_count) ((uint32_t)(range_count) + 16)
/* Maximum size of all templates, and the size from which on unused templates are forgotten. */
#define MAX_TEMPLATES_SIZE (1u << 20)
#define MAX_UNUSED_TEMPLATES_SIZE (1u << 15)
/* Number of launches without a launch of the same signature, after which a template counts as unused. */
#define UNUSED_AFTER_LAUNCHES (1u << 16)
#define MAX_RANGES_OF_TEMPLATE 8192
#define MAX_STATES (1u << 18)
/* Number of recorded launches in a row with equal accesses, after which these accesses become a template. */
#define MIN_EQUAL_LAUNCHES 2
/* After an argument has changed this many times without a change of the accesses, the template applies to all values of
 * this argument. Arguments that
 * are not pointers (scalars), pointers, and distances between pointers are counted separately. */
#define CHANGES_WITHOUT_EFFECT 2
/* Number of uses of a template before its first verification, and maximum number of uses between two verifications. */
#define FIRST_CHECK_INTERVAL 4
#define MAX_CHECK_INTERVAL 4096
/* Maximum number of uses between two verifications, for launches that share allocations with unordered work. */
#define MAX_SHARED_CHECK_INTERVAL 512
/* A launch that is unordered with earlier accesses to its bytes uses the template only after this number of such launches
 * was recorded with accesses equal to those of the template. The races of those launches were reported. */
#define MIN_UNORDERED_LAUNCHES 128

typedef struct {
    launch_hashes last_hashes;      /* hashes of the arguments of the last recorded launch */
    uint64_t digest;                /* hash of the accesses of the last recorded launch */
    uint64_t pointer_hash;          /* hash of the pointers of the launch whose accesses are the template */
    uint64_t distance_hash;         /* hash of the distances between these pointers */
    uint64_t last_launch;           /* value of launch_count at the last launch of the signature */
    uint32_t template_id;           /* 0: no template */
    uint32_t template_size;         /* size of the template; 0: no template */
    uint32_t footprint_range_count; /* number of ranges in ``footprint`` */
    footprint_range *footprint;     /* the bytes that the last recorded launch accessed; NULL: none was recorded */
    uint32_t equal_count;           /* number of recorded launches in a row with the same digest */
    uint32_t use_count;             /* number of launches that used the template */
    uint32_t next_check_use_count;  /* value of use_count at which the template is verified */
    bool is_untrusted;              /* whether launches with equal arguments accessed different bytes */
    bool accesses_depend_on_scalars; /* whether accesses depend on arguments that are not pointers */
    /* Whether the template was verified by a launch on memory that unordered work uses as well, and whether it
     * replaced the recording of such a launch. */
    bool is_checked_in_shared_memory, is_used_in_shared_memory;
    uint8_t
        unordered_equal_count; /* number of recorded launches with the order MEMORY_UNORDERED, up to the minimum */
    bool is_contiguous; /* whether the last recorded launch accessed contiguous bytes from its pointers on */
    /* Number of changes between recorded launches that did not change the accesses, for each kind of argument. */
    uint8_t scalar_change_count, pointer_change_count, distance_change_count;
} signature_state;

static signature_state *states;
static size_t state_count, state_capacity; /* states[0] is unused */
static hash_table state_indices;           /* index in ``states``, by key */
static uint32_t last_template_id, current_generation, templates_size;
static uint64_t launch_count, last_cleanup; /* number of launches, also at the last search for unused templates */
static uint64_t random_state = 0x2545F4914F6CDD1Dull;

static void forget_all_templates(void)
{
    for (size_t i = 1; i <= state_count; i++)
        free(states[i].footprint);
    hash_table_clear(&state_indices);
    state_count = 0;
    templates_size = 0;
    current_generation++;
}

void templates_clear(void)
{
    forget_all_templates();
    last_template_id = 0;
}

/* Write a record so that the analysis forgets a template; id 0: all templates. Later launches must not name it. */
static void record_forgotten(uint32_t template_id)
{
    record rec = record_begin(KIND_TEMPLATE, 0, 0, 0);
    rec.access_template.template_id = template_id;
    record_append(&rec);
}

static void forget_and_record_templates(void)
{
    forget_all_templates();
    record_forgotten(0);
}

/* Forget the template of a signature, if it has one. */
static void forget_template(signature_state *state)
{
    if (!state->template_id)
        return;
    record_forgotten(state->template_id);
    templates_size -= state->template_size;
    state->template_id = state->template_size = 0;
}

/* Forget the templates and the footprints of the signatures that the program no longer launches. A fused kernel has old memory
 * of the stack among its arguments, which may look like a pointer, so a program may have new signatures all the time. The next
 * launch of such a signature is recorded, and has a template again if its accesses are the same. */
static void forget_unused_templates(void)
{
    if (templates_size <= MAX_UNUSED_TEMPLATES_SIZE || launch_count - last_cleanup < UNUSED_AFTER_LAUNCHES)
        return;
    last_cleanup = launch_count;
    for (signature_state *state = states + 1; state <= states + state_count; state++) {
        if (launch_count - state->last_launch < UNUSED_AFTER_LAUNCHES)
            continue;
        forget_template(state);
        free(state->footprint);
        state->footprint = NULL;
        state->footprint_range_count = 0;
    }
}

/* Return the index of the state of a key; a new key gets a new state. Return 0 if no memory is left. */
static uint32_t state_index(uint64_t key)
{
    uint32_t index = hash_table_get(&state_indices, key);
    if (index)
        return index;
    if (state_count + 1 >= MAX_STATES)
        forget_and_record_templates();
    signature_state *new_states = array_reserve(states, &state_capacity, state_count + 2, sizeof *states, 1024);
    if (!new_states)
        return 0;
    states = new_states;
    if (hash_table_put(&state_indices, key, (uint32_t)state_count + 1))
        return 0;
    states[++state_count] = (signature_state){0};
    return (uint32_t)state_count;
}

static uint64_t key_with_scalars(const launch_hashes *hashes)
{
    return ((hashes->key ^ hashes->scalar_hash * 0xD6E8FEB86659FD93ull) * 0x9E3779B97F4A7C15ull) | 1;
}

static uint32_t random_below(uint32_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return limit ? (uint32_t)((random_state >> 32) % limit) : 0;
}

/* Return the number of uses of a template until its next check: about the number of uses so far, up to the maximum. */
static uint32_t check_interval(uint32_t use_count, uint32_t max_interval)
{
    uint32_t interval_uses = use_count < FIRST_CHECK_INTERVAL ? FIRST_CHECK_INTERVAL : use_count;
    if (interval_uses > max_interval)
        interval_uses = max_interval;
    return interval_uses / 2 + random_below(interval_uses) + 1;
}

/* Return whether the template of a signature applies to a launch with these arguments. Scalars may be offsets: a new
 * value of a scalar is accepted only after changes of the scalar made no difference. */
static bool template_applies(const signature_state *state, const launch_hashes *hashes)
{
    if (!state->template_id || (state->scalar_change_count < CHANGES_WITHOUT_EFFECT &&
                                state->last_hashes.scalar_hash != hashes->scalar_hash))
        return false;
    return state->pointer_hash == hashes->pointer_hash || state->distance_change_count >= CHANGES_WITHOUT_EFFECT ||
           (state->distance_hash == hashes->distance_hash &&
            state->pointer_change_count >= CHANGES_WITHOUT_EFFECT);
}

/* Return whether the template applies to launches on memory that unordered work uses as well. Accesses that are not
 * contiguous may depend on the content of memory, such as an index. */
static bool serves_shared_memory(const signature_state *state)
{
    return state->is_checked_in_shared_memory && state->is_contiguous;
}

/* Return whether the template applies to launches with this order. */
static bool serves_order(const signature_state *state, memory_order order)
{
    switch (order) {
    case MEMORY_ORDERED: return true;
    case MEMORY_SHARED: return serves_shared_memory(state);
    case MEMORY_UNORDERED: return state->is_contiguous && state->unordered_equal_count >= MIN_UNORDERED_LAUNCHES;
    case MEMORY_CONTESTED: break;
    }
    return false;
}

static launch_template template_of(const signature_state *state, const launch_hashes *hashes)
{
    return (launch_template){state->template_id, state->pointer_hash != hashes->pointer_hash,
                             serves_shared_memory(state), false};
}

/* Number of unloaded libraries whose modules are unknown. */
static uint32_t unload_count;

void templates_renew_signatures(void)
{
    unload_count++;
}

/* Return a key of the kernel, its grid, block and clusters, and the positions of equal pointers; 0 if there can be no
 * template. */
static uint64_t template_key(const launch_shape *shape, const launch_arguments *arguments)
{
    if (!shape->module || !shape->name || !arguments->is_complete)
        return 0;
    const uint64_t launch_properties[] = {(uint64_t)shape->module << 32 | shape->name,
                                          (uint64_t)shape->grid[0] << 32 | shape->grid[1],
                                          (uint64_t)shape->grid[2] << 32 | shape->block[0],
                                          (uint64_t)shape->block[1] << 32 | shape->block[2],
                                          (uint64_t)shape->cluster[0] << 32 | shape->cluster[1],
                                          (uint64_t)shape->cluster[2] << 32 | unload_count,
                                          shape->context};
    uint64_t key = arguments->pattern_hash;
    for (size_t i = 0; i < sizeof launch_properties / sizeof *launch_properties; i++)
        key = mix_hash(key, launch_properties[i]);
    return key | 1;
}

launch_hashes templates_hash_launch(const launch_shape *shape, const launch_arguments *arguments)
{
    return (launch_hashes){template_key(shape, arguments), arguments->scalar_hash, arguments->pointer_hash,
                           arguments->distance_hash};
}

/* Distinguishes the keys of graphs from those of kernels. */
#define GRAPH_SIGNATURE (1ull << 32)

launch_hashes templates_hash_graph(uint64_t content_hash, uint32_t context)
{
    const uint64_t key =
        content_hash ? mix_hash(mix_hash(content_hash, context), GRAPH_SIGNATURE + unload_count) | 1 : 0;
    return (launch_hashes){key, 0, 0, 0};
}

launch_signature templates_find_signature(const launch_hashes *hashes)
{
    uint32_t index = templates_are_enabled() && hashes->key ? state_index(hashes->key) : 0;
    if (index && states[index].accesses_depend_on_scalars)
        index = state_index(key_with_scalars(hashes));
    return (launch_signature){.hashes = *hashes, .state_index = index, .generation = current_generation};
}

/* Return the state of a signature, or NULL if it has none or was forgotten. */
static signature_state *state_of(const launch_signature *signature)
{
    const bool exists = signature->state_index && signature->generation == current_generation;
    return exists ? states + signature->state_index : NULL;
}

bool templates_apply_to(const launch_signature *signature, bool is_shared)
{
    const signature_state *state = state_of(signature);
    return state && template_applies(state, &signature->hashes) && (state->is_contiguous || !is_shared);
}

launch_footprint templates_footprint(const launch_signature *signature)
{
    const signature_state *state = state_of(signature);
    return state ? (launch_footprint){state->footprint, state->footprint_range_count,
                                      !template_applies(state, &signature->hashes)}
                 : (launch_footprint){NULL, 0, true};
}

/* Return whether a template is due for verification, and set when it is due the next time. */
static bool is_check_due(signature_state *state, bool is_shared)
{
    if (state->use_count < state->next_check_use_count)
        return false;
    state->next_check_use_count =
        state->use_count +
        check_interval(state->use_count, is_shared ? MAX_SHARED_CHECK_INTERVAL : MAX_CHECK_INTERVAL);
    return true;
}

launch_template templates_choose(launch_signature *signature, memory_order order, bool can_be_recorded)
{
    signature_state *state = state_of(signature);
    const bool is_shared = order != MEMORY_ORDERED;
    launch_count++;
    if (state)
        state->last_launch = launch_count;
    if (!state || !template_applies(state, &signature->hashes))
        return (launch_template){0};
    signature->order = order;
    if (!serves_order(state, order))
        return (launch_template){0};
    if (can_be_recorded && is_check_due(state, is_shared)) {
        signature->is_check = true;
        return (launch_template){0};
    }
    state->is_used_in_shared_memory = state->is_used_in_shared_memory || is_shared;
    state->use_count++;
    return template_of(state, &signature->hashes);
}

launch_template templates_use_instead(const launch_signature *signature)
{
    const signature_state *state = state_of(signature);
    if (!state || !template_applies(state, &signature->hashes))
        return (launch_template){0};
    launch_template used_template = template_of(state, &signature->hashes);
    used_template.is_checked = false;
    used_template.is_unordered = true;
    return used_template;
}

/* Set the footprint of a signature to the accesses of its last recorded launch. If they have too many ranges, or no memory
 * is left, the signature has no footprint. */
static void set_footprint(signature_state *state, const footprint *accesses)
{
    const size_t footprint_bytes = accesses->range_count * sizeof *state->footprint;
    free(state->footprint);
    state->footprint = accesses->is_incomplete ? NULL : malloc(footprint_bytes + 1);
    state->footprint_range_count = state->footprint ? (uint32_t)accesses->range_count : 0;
    if (state->footprint)
        memcpy(state->footprint, accesses->ranges, footprint_bytes);
}

/* Make the accesses of a launch the template of its signature, and return its id; 0 if the analysis has no memory. */
static uint32_t add_template(signature_state *state, const launch_hashes *hashes, const access_digest *accesses)
{
    if (accesses->range_count > MAX_RANGES_OF_TEMPLATE)
        return 0;
    forget_unused_templates();
    if (templates_size + TEMPLATE_SIZE(accesses->range_count) > MAX_TEMPLATES_SIZE)
        return 0;
    state->template_size = TEMPLATE_SIZE(accesses->range_count);
    templates_size += state->template_size;
    state->pointer_hash = hashes->pointer_hash;
    state->distance_hash = hashes->distance_hash;
    state->use_count = 0;
    state->next_check_use_count = check_interval(0, MAX_CHECK_INTERVAL);
    return state->template_id = ++last_template_id;
}

static void count_change(uint8_t *change_count, uint64_t hash, uint64_t other_hash)
{
    if (hash != other_hash && *change_count < CHANGES_WITHOUT_EFFECT)
        (*change_count)++;
}

/* Count a recorded launch that is the first of its signature, or that has the same accesses as the last one. */
static void count_equal_launch(signature_state *state, const launch_hashes *hashes)
{
    if (state->equal_count++) {
        count_change(&state->scalar_change_count, state->last_hashes.scalar_hash, hashes->scalar_hash);
        count_change(&state->pointer_change_count, state->last_hashes.pointer_hash, hashes->pointer_hash);
        count_change(&state->distance_change_count, state->last_hashes.distance_hash, hashes->distance_hash);
    }
}

/* Handle a launch that accessed other bytes than the launch before. If the template applied to the launch, and earlier
 * launches used it next to unordered work, the accesses of these launches may have been wrong. */
static void reject_template(signature_state *state, const launch_hashes *hashes, bool is_inside)
{
    if (template_applies(state, hashes) && state->is_used_in_shared_memory)
        record_gap("launches whose template became outdated, on memory that unordered work uses as well");
    if (is_inside && state->last_hashes.scalar_hash != hashes->scalar_hash)
        state->accesses_depend_on_scalars = true;
    else
        state->is_untrusted = true;
    forget_template(state);
}

template_result templates_compare(const launch_signature *signature, const access_digest *accesses)
{
    template_result result = {TEMPLATE_CHECK_NONE, 0};
    signature_state *state = state_of(signature);
    const launch_hashes *hashes = &signature->hashes;
    if (state && state->is_untrusted && state->digest != accesses->hash) {
        set_footprint(state, &accesses->footprint);
        state->digest = accesses->hash;
    }
    if (!state || state->is_untrusted || state->accesses_depend_on_scalars)
        return result;
    const bool is_equal = accesses->is_inside && (!state->equal_count || state->digest == accesses->hash);
    state->is_contiguous = footprint_is_contiguous(&accesses->footprint);
    if (template_applies(state, hashes))
        result.check_result = is_equal ? TEMPLATE_CHECK_EQUAL : TEMPLATE_CHECK_DIFFERENT;
    if (is_equal)
        count_equal_launch(state, hashes);
    else
        reject_template(state, hashes, accesses->is_inside);
    state->is_checked_in_shared_memory =
        state->is_checked_in_shared_memory || (is_equal && signature->order == MEMORY_SHARED);
    if (is_equal && signature->order == MEMORY_UNORDERED && state->unordered_equal_count < MIN_UNORDERED_LAUNCHES)
        state->unordered_equal_count++;
    if (is_equal && state->equal_count >= MIN_EQUAL_LAUNCHES && !state->template_id)
        result.new_template_id = add_template(state, hashes, accesses);
    if (!state->footprint || state->digest != accesses->hash)
        set_footprint(state, &accesses->footprint);
    state->digest = accesses->hash;
    state->last_hashes = *hashes;
    return result;
}
