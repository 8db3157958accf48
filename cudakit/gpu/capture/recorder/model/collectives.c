#include "model/collectives.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "model/allocations.h"
#include "recorder.h"
#include "write/call_sites.h"
#include "write/spool.h"

/* Maximum number of calls whose buffers are not reported yet. NCCL never reports those of symmetric kernels. */
#define MAX_CALLS 65536

#define UNKNOWN_BUFFERS "collective whose buffers are unknown: "

typedef struct {
    uint64_t hash;                /* number that all ranks share; 0: unknown */
    int rank_count;               /* 0: unknown */
    int version;                  /* version of NCCL's profiler interface; 0: the communicator is closed */
    uint32_t call_count;          /* number of calls outside of captures */
    uint32_t captured_call_count; /* number of calls in captures: each rank may capture at another time */
    uint32_t operation_count;     /* number of operations, if NCCL does not report calls */
    uint32_t group_count;         /* number of groups of calls, or of plans if NCCL does not report calls */
    uint64_t last_group;          /* id of the last group of calls */
} nccl_communicator;

static nccl_communicator *communicators; /* the communicator with the number N is communicators[N - 1] */
static size_t communicator_count, communicator_capacity;
static uint32_t old_communicator_count; /* number of open communicators whose launches NCCL does not report */

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

typedef struct nccl_plan {
    struct nccl_plan *next;
    uint64_t id;
    uint32_t communicator; /* number of the communicator; 0: unknown */
    record launch;         /* record of the launch; its kind is 0 until the launch is recorded */
    CUgraphNode node;      /* node of a captured graph; NULL: not captured */
    bool has_report;       /* NCCL has begun to report the buffers */
    bool report_has_ended; /* NCCL has reported all buffers */
    bool is_replay;        /* the report belongs to a launch of a graph, not to its capture */
    record *operations;    /* COLLECTIVE records without the fields of the launch */
    size_t count, capacity;
} nccl_plan;

static nccl_plan *plans; /* oldest first */

/* The operations of a captured node. */
typedef struct {
    record *operations;
    size_t count;
} node_operations;

static node_operations *captured_nodes;
static size_t captured_node_count, captured_node_capacity;
static hash_table captured_node_indices; /* index in ``captured_nodes`` plus 1, by handle of the node */
static const char *refusal;              /* why NCCL does not load the recorder as its plugin; NULL if it does */

/* --- communicators and calls --------------------------------------------------------------------- */

static nccl_communicator *find_communicator(uint32_t number)
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
    nccl_communicator *array =
        array_reserve(communicators, &communicator_capacity, communicator_count + 1, sizeof *array, 16);
    uint32_t number = 0;
    if (array) {
        communicators = array;
        communicators[communicator_count++] =
            (nccl_communicator){.hash = info->hash, .rank_count = info->rank_count, .version = info->version};
        number = (uint32_t)communicator_count;
        old_communicator_count += info->version < NCCL_VERSION_WITH_CALLS;
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
    nccl_communicator *communicator = find_communicator(number);
    if (communicator && !communicator->hash && hash) {
        const communicator_info info = {hash, NULL, rank, 0, communicator->version};
        communicator->hash = hash;
        write_communicator(number, &info);
    }
    pthread_mutex_unlock(&recorder_lock);
}

/* Return the number of the group that a call or a plan belongs to. */
static uint32_t group_number(nccl_communicator *communicator, uint64_t group)
{
    if (!group || group != communicator->last_group)
        communicator->group_count++;
    communicator->last_group = group;
    return communicator->group_count;
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

/* Add a call of the program. The lock is held. */
static void add_call(nccl_communicator *communicator, uint64_t group, const program_call *call)
{
    if (call_count == MAX_CALLS)
        remove_call(calls);
    program_call *array = array_reserve(calls, &call_capacity, call_count + 1, sizeof *calls, 64);
    if (!array)
        return;
    calls = array;
    if (hash_table_put(&call_indices, call->id, (uint32_t)call_count + 1))
        return;
    program_call *added_call = calls + call_count++;
    *added_call = *call;
    if (call->is_captured) {
        added_call->sequence = ++communicator->captured_call_count;
    } else {
        added_call->sequence = ++communicator->call_count;
        added_call->group = group_number(communicator, group);
    }
}

uint64_t collective_called(uint32_t number, uint64_t group, const collective *operation, bool is_captured)
{
    call_site stack;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    nccl_communicator *communicator = find_communicator(number);
    const program_call call = {
        .id = ++last_id, .site = call_site_id(&stack), .operation = *operation, .is_captured = is_captured};
    if (communicator)
        add_call(communicator, group, &call);
    pthread_mutex_unlock(&recorder_lock);
    return call.id;
}

/* --- plans --------------------------------------------------------------------------------------- */

static nccl_plan *new_plan(uint32_t communicator_number)
{
    nccl_plan *plan = calloc(1, sizeof *plan), **end = &plans;
    if (!plan)
        return NULL;
    plan->id = ++last_id;
    plan->communicator = communicator_number;
    while (*end)
        end = &(*end)->next;
    return *end = plan;
}

static nccl_plan *find_plan(uint64_t id)
{
    nccl_plan *plan = id ? plans : NULL;
    while (plan && plan->id != id)
        plan = plan->next;
    return plan;
}

static void remove_plan(nccl_plan *plan)
{
    nccl_plan **link = &plans;
    while (*link != plan)
        link = &(*link)->next;
    *link = plan->next;
    free(plan->operations);
    free(plan);
}

/* Write the operations of a plan whose kernel was launched and whose report has ended, and remove the plan. The
 * ACCESSED record comes first: it belongs to the launch, and each operation is an operation of its own. */
static void write_plan(nccl_plan *plan)
{
    record rec = plan->launch;
    rec.kind = KIND_ACCESSED;
    memset(rec.kind_fields, 0, sizeof rec.kind_fields);
    rec.accessed.exact = plan->count > 0;
    record_append(&rec);
    for (size_t i = 0; i < plan->count; i++) {
        record *operation = plan->operations + i;
        uint32_t site = operation->site;
        rec.kind = KIND_COLLECTIVE;
        rec.site = site ? site : plan->launch.site;
        rec.collective = operation->collective;
        rec.collective.name = plan->launch.launch.name;
        record_append(&rec);
    }
    if (!plan->count)
        record_gap(UNKNOWN_BUFFERS "NCCL did not report them");
    remove_plan(plan);
}

/* Return the operations of a captured node, which are empty for a new node. Return NULL if no memory is left. */
static node_operations *operations_of_node(CUgraphNode node)
{
    const uint64_t key = (uint64_t)(uintptr_t)node;
    uint32_t index = hash_table_get(&captured_node_indices, key);
    if (index)
        return captured_nodes + index - 1;
    node_operations *array = array_reserve(captured_nodes, &captured_node_capacity, captured_node_count + 1,
                                           sizeof *captured_nodes, 16);
    if (!array)
        return NULL;
    captured_nodes = array;
    if (hash_table_put(&captured_node_indices, key, (uint32_t)captured_node_count + 1))
        return NULL;
    captured_nodes[captured_node_count] = (node_operations){NULL, 0};
    return captured_nodes + captured_node_count++;
}

/* Store the operations of a captured plan by its node, and remove the plan. */
static void store_captured(nccl_plan *plan)
{
    node_operations *operations = operations_of_node(plan->node);
    if (operations) {
        free(operations->operations);
        *operations = (node_operations){plan->operations, plan->count};
        plan->operations = NULL;
    }
    remove_plan(plan);
}

/* Write or store a plan once everything about it is reported. */
static void finish_plan(nccl_plan *plan)
{
    if (plan->is_replay) {
        record_gap(UNKNOWN_BUFFERS "captured into a graph, between several hosts");
        remove_plan(plan);
    } else if (plan->launch.kind && plan->report_has_ended) {
        write_plan(plan);
    } else if (plan->node && plan->report_has_ended) {
        store_captured(plan);
    }
}

void communicator_close(uint32_t number)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_communicator *communicator = find_communicator(number);
    if (communicator && communicator->version) {
        old_communicator_count -= communicator->version < NCCL_VERSION_WITH_CALLS;
        communicator->version = 0;
    }
    for (nccl_plan *plan = plans, *next; plan; plan = next) {
        next = plan->next;
        if (plan->communicator != number)
            continue;
        if (plan->launch.kind)
            write_plan(plan);
        else
            remove_plan(plan);
    }
    pthread_mutex_unlock(&recorder_lock);
}

/* Return the first plan of a communicator that was launched but not reported, or was reported but not launched. */
static nccl_plan *first_waiting_plan(uint32_t number, bool has_report)
{
    nccl_plan *plan = plans;
    while (plan && (plan->communicator != number || plan->has_report != has_report || plan->node ||
                    plan->is_replay || (plan->launch.kind != 0) == has_report))
        plan = plan->next;
    return plan;
}

uint64_t collective_launch_begin(uint32_t number)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_plan *plan = first_waiting_plan(number, true);
    if (!plan)
        plan = new_plan(number);
    uint64_t id = plan ? plan->id : 0;
    this_thread.collective_plan = id;
    this_thread.in_collective_launch = true;
    pthread_mutex_unlock(&recorder_lock);
    return id;
}

void collective_launch_end(uint64_t id)
{
    pthread_mutex_lock(&recorder_lock);
    this_thread.in_collective_launch = false;
    nccl_plan *plan = find_plan(id);
    if (plan && !plan->launch.kind && !plan->node) { /* the launch failed, or was not recorded */
        this_thread.collective_plan = 0;
        remove_plan(plan);
    } else if (plan) {
        finish_plan(plan);
    }
    pthread_mutex_unlock(&recorder_lock);
}

uint64_t collective_report_begin(uint32_t number)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_plan *plan = find_plan(this_thread.collective_plan);
    this_thread.collective_plan = 0;
    if (!plan || (plan->communicator && plan->communicator != number) || plan->has_report)
        plan = first_waiting_plan(number, false);
    if (!plan)
        plan = new_plan(number); /* a host function reports the buffers before the launch */
    if (plan) {
        plan->communicator = number;
        plan->has_report = true;
    }
    uint64_t id = plan ? plan->id : 0;
    pthread_mutex_unlock(&recorder_lock);
    return id;
}

void collective_report_end(uint64_t id)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_plan *plan = find_plan(id);
    nccl_communicator *communicator = plan ? find_communicator(plan->communicator) : NULL;
    const bool has_launch = plan && (plan->launch.kind || plan->node);
    if (communicator && !has_launch && communicator->version < NCCL_VERSION_WITH_CALLS) {
        if (plan->count) /* not a late event of a closed communicator */
            record_gaps(UNKNOWN_BUFFERS "the stream is not reported by this version of NCCL", plan->count);
        remove_plan(plan);
    } else if (plan) {
        plan->report_has_ended = true;
        finish_plan(plan);
    }
    pthread_mutex_unlock(&recorder_lock);
}

/* Return the size of the larger buffer of an operation. */
static uint64_t largest_buffer_bytes(const nccl_communicator *communicator, const collective *operation)
{
    /* Bytes of an element, by datatype; a type without a name in NCCL's events is ncclUint8. */
    static const uint8_t ELEMENT_BYTES[] = {1, 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    const bool has_all_parts =
        operation->function == COLLECTIVE_ALL_GATHER || operation->function == COLLECTIVE_REDUCE_SCATTER;
    const uint64_t parts = has_all_parts && communicator->rank_count > 0 ? (uint64_t)communicator->rank_count : 1;
    return operation->count * parts * ELEMENT_BYTES[operation->datatype];
}

void collective_add(uint64_t id, uint64_t call_id, const collective *operation)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_plan *plan = find_plan(id);
    program_call *call = find_call(call_id);
    nccl_communicator *communicator = plan ? find_communicator(plan->communicator) : NULL;
    if (call && call->is_captured && plan && !plan->node)
        plan->is_replay = true;
    record *array =
        communicator ? array_reserve(plan->operations, &plan->capacity, plan->count + 1, sizeof *array, 1) : NULL;
    if (array) {
        /* NCCL reports the buffers of some collectives in bytes. */
        const collective *elements =
            call && call->operation.function == operation->function ? &call->operation : operation;
        plan->operations = array;
        record *rec = array + plan->count++;
        memset(rec, 0, sizeof *rec);
        rec->site = call ? call->site : 0;
        rec->collective.send = operation->send;
        rec->collective.receive = operation->receive;
        /* The buffers are reported after the launch, so that their order with other work is unknown here. */
        const uint64_t bytes = largest_buffer_bytes(communicator, elements);
        allocations_contest(operation->send, operation->send + bytes);
        allocations_contest(operation->receive, operation->receive + bytes);
        rec->collective.element_count = elements->count;
        rec->collective.communicator = plan->communicator;
        rec->collective.sequence = call ? call->sequence : ++communicator->operation_count;
        rec->collective.group = call ? call->group : group_number(communicator, plan->id);
        rec->collective.root = operation->root;
        rec->collective.function = operation->function;
        rec->collective.datatype = elements->datatype;
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
    nccl_plan *plan = find_plan(this_thread.collective_plan);
    this_thread.collective_plan = 0;
    if (plan && !plan->communicator && plan->launch.kind)
        write_plan(plan);
}

/* Return the plan of a launch that NCCL did not announce, because its version is old; NULL for other launches. */
static nccl_plan *old_plan(void)
{
    end_old_plan();
    nccl_plan *plan = old_communicator_count ? new_plan(0) : NULL;
    if (plan)
        this_thread.collective_plan = plan->id;
    return plan;
}

bool collectives_launched(const record *launch_record)
{
    nccl_plan *plan = this_thread.in_collective_launch ? find_plan(this_thread.collective_plan) : old_plan();
    if (plan && !plan->launch.kind) {
        plan->launch = *launch_record;
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
    const nccl_plan *plan = find_plan(this_thread.collective_plan);
    if (plan && !plan->communicator)
        end_old_plan();
    pthread_mutex_unlock(&recorder_lock);
}

/* --- graphs -------------------------------------------------------------------------------------- */

void collectives_node_captured(CUgraphNode node)
{
    if (captured_node_count)
        hash_table_remove(&captured_node_indices, (uint64_t)(uintptr_t)node);
    nccl_plan *plan = this_thread.in_collective_launch ? find_plan(this_thread.collective_plan) : NULL;
    if (plan)
        plan->node = node;
}

bool collectives_write_node(CUgraphNode handle, const record *node_record)
{
    uint32_t index = hash_table_get(&captured_node_indices, (uint64_t)(uintptr_t)handle);
    if (!index)
        return false;
    const node_operations *performed = captured_nodes + index - 1;
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
    communicator_count = call_count = captured_node_count = 0;
    old_communicator_count = 0;
    hash_table_clear(&call_indices);
    hash_table_clear(&captured_node_indices);
}
