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
/* Number of changes of other arguments without effect, after which these arguments are ignored. */
#define VARIED_LAUNCHES 2
/* A template is verified after this number of uses at first, and at most this number apart. */
#define FIRST_CHECK 4
#define MAX_CHECK_INTERVAL 4096

typedef struct {
    uint64_t digest;         /* hash of the accesses of the last recorded launch */
    uint64_t arguments_hash; /* hash of the arguments of the last recorded launch */
    uint32_t template_id;    /* 0: no template */
    uint32_t equal_count;    /* recorded launches with the same digest in a row */
    uint32_t use_count;      /* launches that used the template */
    uint32_t next_check;     /* value of use_count at which the template is verified */
    bool is_untrusted;       /* launches with equal arguments accessed different bytes */
    bool numbers_matter;     /* accesses depend on arguments that are not pointers */
    uint8_t varied_count;    /* launches whose arguments differed from the last one's, but not their accesses */
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

static uint64_t key_with_arguments(uint64_t key, uint64_t arguments_hash)
{
    return ((key ^ arguments_hash * 0xD6E8FEB86659FD93ull) * 0x9E3779B97F4A7C15ull) | 1;
}

static uint32_t random_below(uint32_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return limit ? (uint32_t)((random_state >> 32) % limit) : 0;
}

/* Return the number of uses until the next check: about as many as there were so far, up to the maximum. */
static uint32_t check_interval(uint32_t use_count)
{
    uint32_t interval = use_count < FIRST_CHECK ? FIRST_CHECK : use_count;
    if (interval > MAX_CHECK_INTERVAL)
        interval = MAX_CHECK_INTERVAL;
    return interval / 2 + random_below(interval) + 1;
}

/* Return whether the template applies to a launch with these arguments. Numbers among the arguments may be offsets: a
 * value that was never recorded is accepted only after other values made no difference. */
static bool applies(const signature_state *state, uint64_t arguments_hash)
{
    return state->template_id &&
           (state->varied_count >= VARIED_LAUNCHES || state->arguments_hash == arguments_hash);
}

uint32_t templates_choose(uint64_t key, uint64_t arguments_hash, bool is_contested, bool can_be_recorded,
                          launch_signature *signature)
{
    *signature = (launch_signature){0};
    if (!is_enabled || !key)
        return 0;
    uint32_t index = state_index(key);
    if (index && states[index].numbers_matter)
        index = state_index(key_with_arguments(key, arguments_hash));
    *signature = (launch_signature){index, current_generation, arguments_hash, false};
    signature_state *state = states + index;
    if (!index || is_contested || !applies(state, arguments_hash))
        return 0;
    if (can_be_recorded && state->use_count >= state->next_check) {
        signature->is_check = true;
        state->next_check = state->use_count + check_interval(state->use_count);
        return 0;
    }
    state->use_count++;
    return state->template_id;
}

bool templates_exist(uint64_t key, uint64_t arguments_hash)
{
    const uint32_t index = hash_table_get(&state_numbers, key);
    return index && applies(states + index, arguments_hash);
}

uint32_t templates_use_instead(const launch_signature *signature)
{
    if (!signature->state || signature->generation != current_generation)
        return 0;
    const signature_state *state = states + signature->state;
    return applies(state, signature->arguments_hash) ? state->template_id : 0;
}

/* Give a state a template, if the memory of the analysis allows it. */
static uint32_t add_template(signature_state *state, size_t range_count)
{
    if (range_count > MAX_RANGES_OF_TEMPLATE || template_ranges + range_count > MAX_TEMPLATE_RANGES)
        return 0;
    template_ranges += (uint32_t)range_count;
    state->use_count = 0;
    state->next_check = check_interval(0);
    return state->template_id = ++last_template;
}

/* Handle a launch that accessed other bytes than the last one. */
static void handle_difference(signature_state *state, uint64_t arguments_hash)
{
    if (state->arguments_hash != arguments_hash && !state->varied_count)
        state->numbers_matter = true;
    else
        state->is_untrusted = true;
    state->template_id = 0;
    state->equal_count = 0;
}

template_result templates_compare(const launch_signature *signature, uint64_t digest, size_t range_count,
                                  bool is_inside)
{
    template_result result = {TEMPLATE_CHECK_NONE, 0};
    if (!signature->state || signature->generation != current_generation)
        return result;
    signature_state *state = states + signature->state;
    const bool is_equal = !state->equal_count || state->digest == digest;
    if (state->is_untrusted || state->numbers_matter)
        return result;
    if (state->template_id)
        result.check = is_equal && is_inside ? TEMPLATE_CHECK_EQUAL : TEMPLATE_CHECK_DIFFERENT;
    if (!is_inside) {
        state->is_untrusted = true;
        state->template_id = 0;
    } else if (!is_equal) {
        handle_difference(state, signature->arguments_hash);
    } else {
        if (state->equal_count++ && state->arguments_hash != signature->arguments_hash &&
            state->varied_count < VARIED_LAUNCHES)
            state->varied_count++;
        if (state->equal_count >= EQUAL_LAUNCHES && !state->template_id)
            result.new_template = add_template(state, range_count);
    }
    state->digest = digest;
    state->arguments_hash = signature->arguments_hash;
    return result;
}
