#include "model/collectives.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "model/allocations.h"
#include "recorder.h"
#include "write/call_sites.h"
#include "write/spool.h"

#define UNKNOWN_BUFFERS "collective whose buffers are unknown: "

typedef struct {
    uint64_t hash;
    int version;                     /* version of NCCL's profiler interface; 0: the communicator is closed */
    uint32_t call_count, operations; /* numbers of calls, and of operations without a call */
    uint32_t group_count;            /* number of groups of calls, or of plans if calls are not reported */
    uint32_t captured_count;         /* number of captured calls: each rank may capture them at another time */
    uint64_t last_group;             /* identifies the last group of calls */
} communicator;

static communicator *communicators; /* the communicator N is communicators[N - 1] */
static size_t communicator_count, communicator_capacity;
static uint32_t old_communicators; /* number of open communicators whose kernel launches are not reported */

/* A call of the program whose buffers are not reported yet. The calls of a captured graph are kept, because NCCL may
 * report their buffers in each launch of the graph. */
typedef struct {
    uint64_t id;
    uint32_t site, sequence, group;
    collective operation;
    bool is_captured;
} program_call;

static program_call *calls;
static size_t call_count, call_capacity;
static hash_table call_indices; /* index in ``calls`` plus 1, by id */
static uint64_t last_id;        /* last id of a call or plan */

typedef struct plan {
    struct plan *next;
    uint64_t id;
    uint32_t communicator;      /* 0: unknown */
    record launch;              /* record of the launch; its kind is 0 while there is none */
    CUgraphNode node;           /* node of a captured graph; NULL: not captured */
    bool is_reported, is_ended; /* the report of the buffers has begun, has ended */
    bool is_replay;             /* the buffers of a captured call, in a launch of its graph */
    record *operations;         /* COLLECTIVE records without the fields of the launch */
    size_t count, capacity;
} plan;

static plan *plans; /* oldest first */

/* The operations of a captured node. */
typedef struct {
    record *operations;
    size_t count;
} node_operations;

static node_operations *captured;
static size_t captured_count, captured_capacity;
static hash_table captured_indices; /* index in ``captured`` plus 1, by handle of the node */
static const char *refusal;         /* why NCCL does not load the recorder as its plugin; NULL if it does */

/* --- communicators and calls --------------------------------------------------------------------- */

static communicator *find_communicator(uint32_t number)
{
    return number && number <= communicator_count ? communicators + number - 1 : NULL;
}

static void write_communicator(uint32_t number, const communicator_info *info)
{
    record rec = record_begin(KIND_COMMUNICATOR, 0, 0, 0);
    rec.communicator.hash = info->hash;
    rec.communicator.communicator = number;
    rec.communicator.name = info->name ? spool_text(info->name) : 0;
    rec.communicator.rank = info->rank;
    rec.communicator.rank_count = info->rank_count;
    rec.communicator.profiler_version = (uint32_t)info->version;
    record_append(&rec);
}

uint32_t communicator_open(const communicator_info *info)
{
    pthread_mutex_lock(&recorder_lock);
    communicator *opened =
        array_reserve(communicators, &communicator_capacity, communicator_count + 1, sizeof *opened, 16);
    uint32_t number = 0;
    if (opened) {
        communicators = opened;
        communicators[communicator_count++] = (communicator){.hash = info->hash, .version = info->version};
        number = (uint32_t)communicator_count;
        old_communicators += info->version < NCCL_VERSION_WITH_CALLS;
        write_communicator(number, info);
    } else {
        record_gap(UNKNOWN_BUFFERS "no memory is left");
    }
    pthread_mutex_unlock(&recorder_lock);
    return number;
}

void communicator_identify(uint32_t number, uint64_t hash, int rank)
{
    pthread_mutex_lock(&recorder_lock);
    communicator *identified = find_communicator(number);
    if (identified && !identified->hash && hash) {
        const communicator_info info = {hash, NULL, rank, 0, identified->version};
        identified->hash = hash;
        write_communicator(number, &info);
    }
    pthread_mutex_unlock(&recorder_lock);
}

/* Return the number of the group that a call or a plan belongs to. */
static uint32_t group_number(communicator *owner, uint64_t group)
{
    if (!group || group != owner->last_group)
        owner->group_count++;
    owner->last_group = group;
    return owner->group_count;
}

uint64_t collective_called(uint32_t number, uint64_t group, const collective *operation, bool is_captured)
{
    call_site stack;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    communicator *owner = find_communicator(number);
    program_call *array = array_reserve(calls, &call_capacity, call_count + 1, sizeof *calls, 64);
    uint64_t id = ++last_id;
    if (array)
        calls = array;
    if (array && owner && !hash_table_put(&call_indices, id, (uint32_t)call_count + 1))
        calls[call_count++] =
            (program_call){.id = id,
                           .site = call_site_id(&stack),
                           .sequence = ++*(is_captured ? &owner->captured_count : &owner->call_count),
                           .group = is_captured ? 0 : group_number(owner, group),
                           .operation = *operation,
                           .is_captured = is_captured};
    pthread_mutex_unlock(&recorder_lock);
    return id;
}

static program_call *find_call(uint64_t id)
{
    uint32_t index = id ? hash_table_get(&call_indices, id) : 0;
    return index ? calls + index - 1 : NULL;
}

static void remove_call(program_call *call)
{
    hash_table_remove(&call_indices, call->id);
    program_call *last = calls + --call_count;
    if (call == last)
        return;
    *call = *last;
    hash_table_put(&call_indices, call->id, (uint32_t)(call - calls) + 1);
}

/* --- plans --------------------------------------------------------------------------------------- */

static plan *new_plan(uint32_t communicator_number)
{
    plan *created = calloc(1, sizeof *created), **end = &plans;
    if (!created)
        return NULL;
    created->id = ++last_id;
    created->communicator = communicator_number;
    while (*end)
        end = &(*end)->next;
    return *end = created;
}

static plan *find_plan(uint64_t id)
{
    plan *found = id ? plans : NULL;
    while (found && found->id != id)
        found = found->next;
    return found;
}

static void remove_plan(plan *removed)
{
    plan **link = &plans;
    while (*link != removed)
        link = &(*link)->next;
    *link = removed->next;
    free(removed->operations);
    free(removed);
}

/* Write the operations of a plan whose kernel was launched and whose report has ended, and remove the plan. The
 * ACCESSED record comes first: it belongs to the launch, and each operation is an operation of its own. */
static void write_plan(plan *written)
{
    record rec = written->launch;
    rec.kind = KIND_ACCESSED;
    memset(rec.kind_fields, 0, sizeof rec.kind_fields);
    rec.accessed.exact = written->count > 0;
    record_append(&rec);
    for (size_t i = 0; i < written->count; i++) {
        record *operation = written->operations + i;
        uint32_t site = operation->site;
        rec.kind = KIND_COLLECTIVE;
        rec.site = site ? site : written->launch.site;
        rec.collective = operation->collective;
        rec.collective.name = written->launch.launch.name;
        record_append(&rec);
    }
    if (!written->count)
        record_gap(UNKNOWN_BUFFERS "NCCL did not report them");
    remove_plan(written);
}

/* Store the operations of a captured plan by its node, and remove the plan. */
static void store_captured(plan *stored)
{
    const uint64_t key = (uint64_t)(uintptr_t)stored->node;
    uint32_t index = hash_table_get(&captured_indices, key);
    if (!index) {
        node_operations *array =
            array_reserve(captured, &captured_capacity, captured_count + 1, sizeof *captured, 16);
        if (array && !hash_table_put(&captured_indices, key, (uint32_t)captured_count + 1)) {
            captured = array;
            captured[captured_count++] = (node_operations){NULL, 0};
            index = (uint32_t)captured_count;
        }
    }
    if (index) {
        free(captured[index - 1].operations);
        captured[index - 1] = (node_operations){stored->operations, stored->count};
        stored->operations = NULL;
    }
    remove_plan(stored);
}

/* Write or store a plan once everything about it is reported. */
static void finish_plan(plan *finished)
{
    if (finished->is_replay) {
        record_gap(UNKNOWN_BUFFERS "captured into a graph, between several hosts");
        remove_plan(finished);
    } else if (finished->launch.kind && finished->is_ended) {
        write_plan(finished);
    } else if (finished->node && finished->is_ended) {
        store_captured(finished);
    }
}

void communicator_close(uint32_t number)
{
    pthread_mutex_lock(&recorder_lock);
    communicator *closed = find_communicator(number);
    if (closed && closed->version) {
        old_communicators -= closed->version < NCCL_VERSION_WITH_CALLS;
        closed->version = 0;
    }
    for (plan *each = plans, *next; each; each = next) {
        next = each->next;
        if (each->communicator != number)
            continue;
        if (each->launch.kind)
            write_plan(each);
        else
            remove_plan(each);
    }
    pthread_mutex_unlock(&recorder_lock);
}

/* Return the first plan of a communicator that was launched but not reported, or was reported but not launched. */
static plan *first_waiting_plan(uint32_t number, bool is_reported)
{
    plan *waiting = plans;
    while (waiting && (waiting->communicator != number || waiting->is_reported != is_reported || waiting->node ||
                       waiting->is_replay || (waiting->launch.kind != 0) == is_reported))
        waiting = waiting->next;
    return waiting;
}

uint64_t collective_launch_begin(uint32_t number)
{
    pthread_mutex_lock(&recorder_lock);
    plan *launched = first_waiting_plan(number, true);
    if (!launched)
        launched = new_plan(number);
    uint64_t id = launched ? launched->id : 0;
    this_thread.collective_plan = id;
    this_thread.in_collective_launch = true;
    pthread_mutex_unlock(&recorder_lock);
    return id;
}

void collective_launch_end(uint64_t id)
{
    pthread_mutex_lock(&recorder_lock);
    this_thread.in_collective_launch = false;
    plan *launched = find_plan(id);
    if (launched && !launched->launch.kind && !launched->node) { /* the launch failed, or was not recorded */
        this_thread.collective_plan = 0;
        remove_plan(launched);
    } else if (launched) {
        finish_plan(launched);
    }
    pthread_mutex_unlock(&recorder_lock);
}

uint64_t collective_report_begin(uint32_t number)
{
    pthread_mutex_lock(&recorder_lock);
    plan *reported = find_plan(this_thread.collective_plan);
    this_thread.collective_plan = 0;
    if (!reported || (reported->communicator && reported->communicator != number) || reported->is_reported)
        reported = first_waiting_plan(number, false);
    if (!reported)
        reported = new_plan(number); /* a host function reports the buffers before the launch */
    if (reported) {
        reported->communicator = number;
        reported->is_reported = true;
    }
    uint64_t id = reported ? reported->id : 0;
    pthread_mutex_unlock(&recorder_lock);
    return id;
}

void collective_report_end(uint64_t id)
{
    pthread_mutex_lock(&recorder_lock);
    plan *reported = find_plan(id);
    communicator *owner = reported ? find_communicator(reported->communicator) : NULL;
    if (reported && !reported->launch.kind && !reported->node && owner &&
        owner->version < NCCL_VERSION_WITH_CALLS) {
        record_gaps(UNKNOWN_BUFFERS "the stream is not reported by this version of NCCL", reported->count);
        remove_plan(reported);
    } else if (reported) {
        reported->is_ended = true;
        finish_plan(reported);
    }
    pthread_mutex_unlock(&recorder_lock);
}

void collective_add(uint64_t id, uint64_t call_id, const collective *operation)
{
    pthread_mutex_lock(&recorder_lock);
    plan *owner = find_plan(id);
    program_call *call = find_call(call_id);
    communicator *of_plan = owner ? find_communicator(owner->communicator) : NULL;
    if (call && call->is_captured && owner && !owner->node)
        owner->is_replay = true;
    record *array =
        of_plan ? array_reserve(owner->operations, &owner->capacity, owner->count + 1, sizeof *array, 1) : NULL;
    if (array) {
        /* NCCL reports the buffers of some collectives in bytes. */
        const collective *described =
            call && call->operation.function == operation->function ? &call->operation : operation;
        owner->operations = array;
        record *rec = array + owner->count++;
        memset(rec, 0, sizeof *rec);
        rec->site = call ? call->site : 0;
        rec->collective.send = operation->send;
        rec->collective.receive = operation->receive;
        /* The buffers are reported after the launch, so that their order with other work is unknown here. */
        allocations_contest(operation->send, operation->send + 1);
        allocations_contest(operation->receive, operation->receive + 1);
        rec->collective.element_count = described->count;
        rec->collective.communicator = owner->communicator;
        rec->collective.sequence = call ? call->sequence : ++of_plan->operations;
        rec->collective.group = call ? call->group : group_number(of_plan, owner->id);
        rec->collective.root = operation->root;
        rec->collective.function = operation->function;
        rec->collective.datatype = described->datatype;
    }
    if (call && !call->is_captured)
        remove_call(call);
    pthread_mutex_unlock(&recorder_lock);
}

void collective_unknown(const char *reason)
{
    pthread_mutex_lock(&recorder_lock);
    record_gap_detail(UNKNOWN_BUFFERS, reason);
    pthread_mutex_unlock(&recorder_lock);
}

/* --- kernel launches ----------------------------------------------------------------------------- */

static bool has_prefix(const char *name, const char *prefix)
{
    return !strncmp(name, prefix, strlen(prefix));
}

bool is_nccl_kernel(const char *name)
{
    if (!name)
        return false;
    if (has_prefix(name, "_Z")) /* a mangled name has the length of the name next */
        for (name += 2; isdigit((unsigned char)*name);)
            name++;
    return has_prefix(name, "ncclDevKernel") || has_prefix(name, "ncclKernel") || has_prefix(name, "ncclSym");
}

/* End the plan of an old NCCL that this thread launched, because NCCL did not report its buffers on this thread. */
static void end_old_plan(void)
{
    plan *old = find_plan(this_thread.collective_plan);
    this_thread.collective_plan = 0;
    if (old && !old->communicator && old->launch.kind)
        write_plan(old);
}

/* Return the plan of a launch that NCCL did not announce, because its version is old; NULL for other launches. */
static plan *old_plan(void)
{
    end_old_plan();
    plan *created = old_communicators ? new_plan(0) : NULL;
    if (created)
        this_thread.collective_plan = created->id;
    return created;
}

bool collectives_launched(const record *launch_record)
{
    plan *launched = this_thread.in_collective_launch ? find_plan(this_thread.collective_plan) : old_plan();
    if (launched && !launched->launch.kind) {
        launched->launch = *launch_record;
        return true;
    }
    record_gap_detail(UNKNOWN_BUFFERS, refusal              ? refusal
                                       : communicator_count ? "NCCL does not report this kind of operation"
                                                            : "NCCL loaded no profiler plugin");
    return false;
}

void collectives_event_recorded(void)
{
    if (!this_thread.collective_plan || this_thread.in_collective_launch)
        return;
    pthread_mutex_lock(&recorder_lock);
    const plan *launched = find_plan(this_thread.collective_plan);
    if (launched && !launched->communicator)
        end_old_plan();
    pthread_mutex_unlock(&recorder_lock);
}

/* --- graphs -------------------------------------------------------------------------------------- */

void collectives_node_captured(CUgraphNode node)
{
    if (captured_count)
        hash_table_remove(&captured_indices, (uint64_t)(uintptr_t)node);
    plan *launched = this_thread.in_collective_launch ? find_plan(this_thread.collective_plan) : NULL;
    if (launched)
        launched->node = node;
}

bool collectives_write_node(CUgraphNode handle, const record *node_record)
{
    uint32_t index = hash_table_get(&captured_indices, (uint64_t)(uintptr_t)handle);
    if (!index)
        return false;
    const node_operations *performed = captured + index - 1;
    for (size_t i = 0; i < performed->count; i++) {
        record rec = *node_record;
        rec.kind = KIND_COLLECTIVE;
        memset(rec.kind_fields, 0, sizeof rec.kind_fields);
        rec.site = performed->operations[i].site ? performed->operations[i].site : rec.site;
        rec.collective = performed->operations[i].collective;
        rec.collective.graph = node_record->node.graph;
        rec.collective.node = node_record->node.node;
        rec.collective.name = node_record->node.name;
        record_append(&rec);
    }
    return true;
}

void collectives_set_refusal(const char *reason)
{
    refusal = reason;
}

void collectives_discard_plans(void)
{
    pthread_mutex_lock(&recorder_lock);
    while (plans)
        remove_plan(plans);
    pthread_mutex_unlock(&recorder_lock);
}

void collectives_clear(void)
{
    while (plans)
        remove_plan(plans);
    communicator_count = call_count = captured_count = 0;
    old_communicators = 0;
    hash_table_clear(&call_indices);
    hash_table_clear(&captured_indices);
}
