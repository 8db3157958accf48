#include "exact/templates.h"

#include <stdlib.h>

#include "containers.h"
#include "recorder.h"

/* The analysis keeps the ranges of all templates in memory, 96 bytes each. */
#define MAX_TEMPLATE_RANGES (1u << 20)
#define MAX_RANGES_OF_TEMPLATE 8192
#define MAX_STATES (1u << 18)
/* Number of recorded launches in a row with equal accesses, after which these accesses become a template. */
#define MIN_EQUAL_LAUNCHES 2
/* Number of changes of an argument that changed no access, after which a template applies to all values. Arguments that
 * are not pointers (scalars), pointers, and distances between pointers are counted separately. */
#define CHANGES_WITHOUT_EFFECT 2
/* Number of uses of a template before its first verification, and maximum number of uses between two verifications. */
#define FIRST_CHECK_INTERVAL 4
#define MAX_CHECK_INTERVAL 4096

typedef struct {
    launch_hashes last_hashes;       /* hashes of the arguments of the last recorded launch */
    uint64_t digest;                 /* hash of the accesses of the last recorded launch */
    uint64_t pointer_hash;           /* hash of the pointers of the launch whose accesses are the template */
    uint64_t distance_hash;          /* hash of the distances between these pointers */
    uint32_t template_id;            /* 0: no template */
    uint32_t equal_count;            /* number of recorded launches in a row with the same digest */
    uint32_t use_count;              /* number of launches that used the template */
    uint32_t next_check_use_count;   /* value of use_count at which the template is verified */
    bool is_untrusted;               /* whether launches with equal arguments accessed different bytes */
    bool accesses_depend_on_scalars; /* whether accesses depend on arguments that are not pointers */
    /* Number of changes between recorded launches that did not change the accesses, for each kind of argument. */
    uint8_t scalar_change_count, pointer_change_count, distance_change_count;
} signature_state;

static bool templates_enabled;
static signature_state *states;
static size_t state_count, state_capacity; /* states[0] is unused */
static hash_table state_indices;           /* index in ``states``, by key */
static uint32_t last_template_id, current_generation, template_range_count;
static uint64_t random_state = 0x2545F4914F6CDD1Dull;

void templates_enable(void)
{
    templates_enabled = true;
}

bool templates_are_enabled(void)
{
    return templates_enabled;
}

static void forget_all_templates(void)
{
    hash_table_clear(&state_indices);
    state_count = 0;
    template_range_count = 0;
    current_generation++;
}

void templates_clear(void)
{
    forget_all_templates();
    last_template_id = 0;
}

/* Forget all templates, and write a record so that the analysis forgets the templates as well. */
static void forget_and_record_templates(void)
{
    forget_all_templates();
    record rec = record_begin(KIND_TEMPLATE, 0, 0, 0);
    record_append(&rec);
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
static uint32_t check_interval(uint32_t use_count)
{
    uint32_t interval_uses = use_count < FIRST_CHECK_INTERVAL ? FIRST_CHECK_INTERVAL : use_count;
    if (interval_uses > MAX_CHECK_INTERVAL)
        interval_uses = MAX_CHECK_INTERVAL;
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

static launch_template template_of(const signature_state *state, const launch_hashes *hashes)
{
    return (launch_template){state->template_id, state->pointer_hash != hashes->pointer_hash};
}

launch_template templates_choose(const launch_hashes *hashes, bool is_contested, bool can_be_recorded,
                                 launch_signature *signature)
{
    *signature = (launch_signature){0};
    if (!templates_enabled || !hashes->key)
        return (launch_template){0};
    uint32_t index = state_index(hashes->key);
    if (index && states[index].accesses_depend_on_scalars)
        index = state_index(key_with_scalars(hashes));
    *signature = (launch_signature){*hashes, index, current_generation, false};
    signature_state *state = states + index;
    if (!index || is_contested || !template_applies(state, hashes))
        return (launch_template){0};
    if (can_be_recorded && state->use_count >= state->next_check_use_count) {
        signature->is_check = true;
        state->next_check_use_count = state->use_count + check_interval(state->use_count);
        return (launch_template){0};
    }
    state->use_count++;
    return template_of(state, hashes);
}

bool template_exists(const launch_hashes *hashes)
{
    const uint32_t index = hash_table_get(&state_indices, hashes->key);
    return index && template_applies(states + index, hashes);
}

launch_template templates_use_instead(const launch_signature *signature)
{
    if (!signature->state_index || signature->generation != current_generation ||
        !template_applies(states + signature->state_index, &signature->hashes))
        return (launch_template){0};
    return template_of(states + signature->state_index, &signature->hashes);
}

/* Make the accesses of a launch the template of its signature, and return its id; 0 if the analysis has no memory. */
static uint32_t add_template(signature_state *state, const launch_hashes *hashes, size_t range_count)
{
    if (range_count > MAX_RANGES_OF_TEMPLATE || template_range_count + range_count > MAX_TEMPLATE_RANGES)
        return 0;
    template_range_count += (uint32_t)range_count;
    state->pointer_hash = hashes->pointer_hash;
    state->distance_hash = hashes->distance_hash;
    state->use_count = 0;
    state->next_check_use_count = check_interval(0);
    return state->template_id = ++last_template_id;
}

static void count_change(uint8_t *change_count, uint64_t hash, uint64_t other_hash)
{
    if (hash != other_hash && *change_count < CHANGES_WITHOUT_EFFECT)
        (*change_count)++;
}

/* Count a launch with the same accesses as the last launch of the signature, or the first launch. */
static void count_equal_launch(signature_state *state, const launch_hashes *hashes)
{
    if (state->equal_count++) {
        count_change(&state->scalar_change_count, state->last_hashes.scalar_hash, hashes->scalar_hash);
        count_change(&state->pointer_change_count, state->last_hashes.pointer_hash, hashes->pointer_hash);
        count_change(&state->distance_change_count, state->last_hashes.distance_hash, hashes->distance_hash);
    }
}

/* Remove the template of a signature, because a launch accessed other bytes than the launch before. */
static void reject_template(signature_state *state, const launch_hashes *hashes)
{
    if (state->last_hashes.scalar_hash != hashes->scalar_hash)
        state->accesses_depend_on_scalars = true;
    else
        state->is_untrusted = true;
    state->template_id = 0;
}

template_result templates_compare(const launch_signature *signature, uint64_t digest, size_t range_count,
                                  bool is_inside)
{
    template_result result = {TEMPLATE_CHECK_NONE, 0};
    if (!signature->state_index || signature->generation != current_generation)
        return result;
    signature_state *state = states + signature->state_index;
    const launch_hashes *hashes = &signature->hashes;
    const bool is_equal = is_inside && (!state->equal_count || state->digest == digest);
    if (state->is_untrusted || state->accesses_depend_on_scalars)
        return result;
    if (template_applies(state, hashes))
        result.check_result = is_equal ? TEMPLATE_CHECK_EQUAL : TEMPLATE_CHECK_DIFFERENT;
    if (is_equal)
        count_equal_launch(state, hashes);
    else if (is_inside)
        reject_template(state, hashes);
    else
        state->is_untrusted = true, state->template_id = 0;
    if (is_equal && state->equal_count >= MIN_EQUAL_LAUNCHES && !state->template_id)
        result.new_template_id = add_template(state, hashes, range_count);
    state->digest = digest;
    state->last_hashes = *hashes;
    return result;
}
