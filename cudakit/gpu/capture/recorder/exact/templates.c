#include "exact/templates.h"

#include <stdlib.h>

#include "containers.h"
#include "recorder.h"

/* The analysis keeps the ranges of all templates in memory, 96 bytes each. */
#define MAX_TEMPLATE_RANGES (1u << 20)
#define MAX_RANGES_OF_TEMPLATE 8192
#define MAX_STATES (1u << 18)
/* Number of equal observations that make a template. */
#define EQUAL_LAUNCHES 2
/* Number of changes without effect, after which a template applies whatever the value: changes of the arguments that are
 * not pointers, of the pointers, and of the distances between pointers. */
#define CHANGES_WITHOUT_EFFECT 2
/* A template is verified after this number of uses at first, and at most this number apart. */
#define FIRST_CHECK 4
#define MAX_CHECK_INTERVAL 4096

typedef struct {
    launch_hashes last;     /* arguments of the last recorded launch */
    uint64_t digest;        /* hash of its accesses */
    uint64_t pointer_hash;  /* pointers of the launch whose accesses are the template */
    uint64_t distance_hash; /* distances of these pointers */
    uint32_t template_id;   /* 0: no template */
    uint32_t equal_count;   /* recorded launches with the same digest in a row */
    uint32_t use_count;     /* launches that used the template */
    uint32_t next_check;    /* value of use_count at which the template is verified */
    bool is_untrusted;      /* launches with equal arguments accessed different bytes */
    bool numbers_matter;    /* accesses depend on arguments that are not pointers */
    uint8_t
        number_changes; /* recorded launches whose numbers differed from the last ones, but not their accesses */
    uint8_t pointer_changes;  /* the same for pointers */
    uint8_t distance_changes; /* the same for distances between pointers */
} signature_state;

static bool is_enabled;
static signature_state *states;
static size_t state_count, state_capacity; /* states[0] is unused */
static hash_table state_numbers;           /* index in ``states``, by key */
static uint32_t last_template, current_generation, template_ranges;
static uint64_t random_state = 0x2545F4914F6CDD1Dull;

void templates_enable(void)
{
    is_enabled = true;
}

bool templates_are_enabled(void)
{
    return is_enabled;
}

static void forget_all(void)
{
    hash_table_clear(&state_numbers);
    state_count = 0;
    template_ranges = 0;
    current_generation++;
}

void templates_clear(void)
{
    forget_all();
    last_template = 0;
}

/* Forget all templates, and record that the analysis can forget them. */
static void forget_and_record(void)
{
    forget_all();
    record rec = record_begin(KIND_TEMPLATE, 0, 0, 0);
    record_append(&rec);
}

/* Return the index of the state of a key; a new key gets a new state. Return 0 if no memory is left. */
static uint32_t state_index(uint64_t key)
{
    uint32_t index = hash_table_get(&state_numbers, key);
    if (index)
        return index;
    if (state_count + 1 >= MAX_STATES)
        forget_and_record();
    signature_state *new_states = array_reserve(states, &state_capacity, state_count + 2, sizeof *states, 1024);
    if (!new_states)
        return 0;
    states = new_states;
    if (hash_table_put(&state_numbers, key, (uint32_t)state_count + 1))
        return 0;
    states[++state_count] = (signature_state){0};
    return (uint32_t)state_count;
}

static uint64_t key_with_numbers(const launch_hashes *hashes)
{
    return ((hashes->key ^ hashes->number_hash * 0xD6E8FEB86659FD93ull) * 0x9E3779B97F4A7C15ull) | 1;
}

static uint32_t random_below(uint32_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return limit ? (uint32_t)((random_state >> 32) % limit) : 0;
}

/* Return the number of uses until the next check: about the number of uses so far, up to the maximum. */
static uint32_t check_interval(uint32_t use_count)
{
    uint32_t interval = use_count < FIRST_CHECK ? FIRST_CHECK : use_count;
    if (interval > MAX_CHECK_INTERVAL)
        interval = MAX_CHECK_INTERVAL;
    return interval / 2 + random_below(interval) + 1;
}

/* Return whether the template applies to a launch with these arguments. Numbers may be offsets: a value that was never
 * recorded is accepted only after other values made no difference. */
static bool applies(const signature_state *state, const launch_hashes *hashes)
{
    if (!state->template_id ||
        (state->number_changes < CHANGES_WITHOUT_EFFECT && state->last.number_hash != hashes->number_hash))
        return false;
    return state->pointer_hash == hashes->pointer_hash || state->distance_changes >= CHANGES_WITHOUT_EFFECT ||
           (state->distance_hash == hashes->distance_hash && state->pointer_changes >= CHANGES_WITHOUT_EFFECT);
}

static launch_template template_of(const signature_state *state, const launch_hashes *hashes)
{
    return (launch_template){state->template_id, state->pointer_hash != hashes->pointer_hash};
}

launch_template templates_choose(const launch_hashes *hashes, bool is_contested, bool can_be_recorded,
                                 launch_signature *signature)
{
    *signature = (launch_signature){0};
    if (!is_enabled || !hashes->key)
        return (launch_template){0};
    uint32_t index = state_index(hashes->key);
    if (index && states[index].numbers_matter)
        index = state_index(key_with_numbers(hashes));
    *signature = (launch_signature){*hashes, index, current_generation, false};
    signature_state *state = states + index;
    if (!index || is_contested || !applies(state, hashes))
        return (launch_template){0};
    if (can_be_recorded && state->use_count >= state->next_check) {
        signature->is_check = true;
        state->next_check = state->use_count + check_interval(state->use_count);
        return (launch_template){0};
    }
    state->use_count++;
    return template_of(state, hashes);
}

bool templates_exist(const launch_hashes *hashes)
{
    const uint32_t index = hash_table_get(&state_numbers, hashes->key);
    return index && applies(states + index, hashes);
}

launch_template templates_use_instead(const launch_signature *signature)
{
    if (!signature->state || signature->generation != current_generation ||
        !applies(states + signature->state, &signature->hashes))
        return (launch_template){0};
    return template_of(states + signature->state, &signature->hashes);
}

/* Give a state a template, if the memory of the analysis allows it. */
static uint32_t add_template(signature_state *state, const launch_hashes *hashes, size_t range_count)
{
    if (range_count > MAX_RANGES_OF_TEMPLATE || template_ranges + range_count > MAX_TEMPLATE_RANGES)
        return 0;
    template_ranges += (uint32_t)range_count;
    state->pointer_hash = hashes->pointer_hash;
    state->distance_hash = hashes->distance_hash;
    state->use_count = 0;
    state->next_check = check_interval(0);
    return state->template_id = ++last_template;
}

static void count_change(uint8_t *count, uint64_t hash, uint64_t other_hash)
{
    if (hash != other_hash && *count < CHANGES_WITHOUT_EFFECT)
        (*count)++;
}

/* Handle a launch with the same accesses as the last one, or the first launch. */
static void handle_equality(signature_state *state, const launch_hashes *hashes)
{
    if (state->equal_count++) {
        count_change(&state->number_changes, state->last.number_hash, hashes->number_hash);
        count_change(&state->pointer_changes, state->last.pointer_hash, hashes->pointer_hash);
        count_change(&state->distance_changes, state->last.distance_hash, hashes->distance_hash);
    }
}

/* Handle a launch that accessed other bytes than the last one. */
static void handle_difference(signature_state *state, const launch_hashes *hashes)
{
    if (state->last.number_hash != hashes->number_hash)
        state->numbers_matter = true;
    else
        state->is_untrusted = true;
    state->template_id = 0;
}

template_result templates_compare(const launch_signature *signature, uint64_t digest, size_t range_count,
                                  bool is_inside)
{
    template_result result = {TEMPLATE_CHECK_NONE, 0};
    if (!signature->state || signature->generation != current_generation)
        return result;
    signature_state *state = states + signature->state;
    const launch_hashes *hashes = &signature->hashes;
    const bool is_equal = is_inside && (!state->equal_count || state->digest == digest);
    if (state->is_untrusted || state->numbers_matter)
        return result;
    if (applies(state, hashes))
        result.check = is_equal ? TEMPLATE_CHECK_EQUAL : TEMPLATE_CHECK_DIFFERENT;
    if (is_equal)
        handle_equality(state, hashes);
    else if (is_inside)
        handle_difference(state, hashes);
    else
        state->is_untrusted = true, state->template_id = 0;
    if (is_equal && state->equal_count >= EQUAL_LAUNCHES && !state->template_id)
        result.new_template = add_template(state, hashes, range_count);
    state->digest = digest;
    state->last = *hashes;
    return result;
}
