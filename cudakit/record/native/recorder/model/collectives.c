#include "model/collectives.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "model/allocations.h"
#include "recorder.h"
#include "write/call_sites.h"
#include "write/spool.h"

/* Maximum number of calls whose buffers are not reported yet. NCCL never reports the buffers of symmetric kernels. */
#define MAX_UNREPORTED_CALLS 65536

#define UNKNOWN_BUFFERS "collective whose buffers are unknown: "

typedef struct {
    uint64_t hash;                /* hash of the communicator, which is the same in all ranks; 0: unknown */
    int rank_count;               /* number of ranks; 0: unknown */
    int profiler_version;         /* version of NCCL's profiler interface; 0: the communicator is closed */
    uint32_t call_count;          /* number of calls outside of stream captures */
    uint32_t captured_call_count; /* number of calls in stream captures: each rank may capture at another time */
    uint32_t operation_count;     /* number of operations, if NCCL does not report calls */
    uint32_t group_count;         /* number of groups of calls, or of plans if NCCL does not report calls */
    uint64_t last_group_id;       /* id of the last group of calls */
} nccl_communicator;

/* Id of the last plan that this thread launched, 0 once its buffers are reported; and whether the thread is launching
 * the plan. */
static __thread uint64_t last_plan_id;
static __thread bool is_in_launch;

static nccl_communicator *communicators; /* the communicator with the number N is communicators[N - 1] */
static size_t communicator_count, communicator_capacity;
/* Number of open communicators whose calls and launches NCCL does not report. */
static uint32_t communicators_without_calls;

/* A call of an NCCL function whose buffers are not reported yet. The calls of a captured graph stay in memory, because
 * NCCL may report their buffers in each launch of the graph. */
typedef struct {
    uint64_t id;
    uint32_t site;         /* id of the call stack */
    uint32_t call_number;  /* number of the call on its communicator, from 1 */
    uint32_t group_number; /* number of the call's group on its communicator, from 1; 0: captured */
    collective operation;
    bool is_captured;
} nccl_call;

static nccl_call *nccl_calls;
static size_t nccl_call_count, nccl_call_capacity;
static hash_table nccl_call_indices;  /* index in ``nccl_calls`` plus 1, by id of the call */
static uint64_t last_call_or_plan_id; /* the id that the newest call or plan got */

typedef struct nccl_plan {
    struct nccl_plan *next;
    uint64_t id;
    uint32_t communicator_number; /* number of the communicator; 0: unknown */
    record launch;         /* record of the launch; the kind of the record is 0 until the launch is recorded */
    CUgraphNode node;      /* node of a captured graph; NULL: the launch is not captured */
    bool has_report;       /* whether NCCL has begun to report the buffers */
    bool report_has_ended; /* whether NCCL has reported all buffers */
    /* Whether NCCL reports the buffers for a launch of a graph, not for the capture of the graph. */
    bool is_replay;
    record *operations; /* COLLECTIVE records without the fields of the launch */
    size_t operation_count, operation_capacity;
} nccl_plan;

static nccl_plan *plans; /* oldest first */

/* The operations of a captured node. */
typedef struct {
    record *operations;
    size_t operation_count;
} node_operations;

static node_operations *captured_nodes;
static size_t captured_node_count, captured_node_capacity;
static hash_table captured_node_indices; /* index in ``captured_nodes`` plus 1, by handle of the node */
static const char *plugin_refusal;       /* why NCCL does not load the recorder as its plugin; NULL if it does */

/* --- communicators and calls --------------------------------------------------------------------- */

static nccl_communicator *find_communicator(uint32_t communicator_number)
{
    return communicator_number && communicator_number <= communicator_count
               ? communicators + communicator_number - 1
               : NULL;
}

static void write_communicator(uint32_t communicator_number, const communicator_info *info)
{
    record rec = record_begin(KIND_COMMUNICATOR, 0, 0, 0);
    rec.communicator.hash = info->hash;
    rec.communicator.communicator = communicator_number;
    rec.communicator.name = info->name ? spool_text(info->name) : 0;
    rec.communicator.rank = info->rank;
    rec.communicator.rank_count = info->rank_count;
    rec.communicator.profiler_version = (uint32_t)info->profiler_version;
    record_append(&rec);
}

uint32_t communicator_open(const communicator_info *info)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_communicator *new_communicators = array_reserve(communicators, &communicator_capacity,
                                                         communicator_count + 1, sizeof *new_communicators, 16);
    uint32_t communicator_number = 0;
    if (new_communicators) {
        communicators = new_communicators;
        communicators[communicator_count++] = (nccl_communicator){
            .hash = info->hash, .rank_count = info->rank_count, .profiler_version = info->profiler_version};
        communicator_number = (uint32_t)communicator_count;
        communicators_without_calls += info->profiler_version < NCCL_VERSION_WITH_CALLS;
        write_communicator(communicator_number, info);
    } else {
        record_gap(UNKNOWN_BUFFERS "no memory is left");
    }
    pthread_mutex_unlock(&recorder_lock);
    return communicator_number;
}

void communicator_set_hash_and_rank(uint32_t communicator_number, uint64_t hash, int rank)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_communicator *communicator = find_communicator(communicator_number);
    if (communicator && !communicator->hash && hash) {
        const communicator_info info = {hash, NULL, rank, 0, communicator->profiler_version};
        communicator->hash = hash;
        write_communicator(communicator_number, &info);
    }
    pthread_mutex_unlock(&recorder_lock);
}

/* Return the number of the group that a call or a plan belongs to; the communicator counts its groups. */
static uint32_t group_number(nccl_communicator *communicator, uint64_t group)
{
    if (!group || group != communicator->last_group_id)
        communicator->group_count++;
    communicator->last_group_id = group;
    return communicator->group_count;
}

static nccl_call *find_nccl_call(uint64_t call_id)
{
    uint32_t index = call_id ? hash_table_get(&nccl_call_indices, call_id) : 0;
    return index ? nccl_calls + index - 1 : NULL;
}

static void remove_nccl_call(nccl_call *call)
{
    hash_table_remove(&nccl_call_indices, call->id);
    nccl_call *last_call = nccl_calls + --nccl_call_count;
    if (call == last_call)
        return;
    *call = *last_call;
    hash_table_put(&nccl_call_indices, call->id, (uint32_t)(call - nccl_calls) + 1);
}

/* Store a call of an NCCL function until its buffers are reported. The recorder lock is held. */
static void add_nccl_call(nccl_communicator *communicator, uint64_t group, const nccl_call *call)
{
    if (nccl_call_count == MAX_UNREPORTED_CALLS)
        remove_nccl_call(nccl_calls);
    nccl_call *new_calls =
        array_reserve(nccl_calls, &nccl_call_capacity, nccl_call_count + 1, sizeof *nccl_calls, 64);
    if (!new_calls)
        return;
    nccl_calls = new_calls;
    if (hash_table_put(&nccl_call_indices, call->id, (uint32_t)nccl_call_count + 1))
        return;
    nccl_call *added_call = nccl_calls + nccl_call_count++;
    *added_call = *call;
    if (call->is_captured) {
        added_call->call_number = ++communicator->captured_call_count;
    } else {
        added_call->call_number = ++communicator->call_count;
        added_call->group_number = group_number(communicator, group);
    }
}

uint64_t collective_record_call(uint32_t communicator_number, uint64_t group, const collective *operation,
                                bool is_captured)
{
    call_site stack;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    nccl_communicator *communicator = find_communicator(communicator_number);
    const nccl_call call = {.id = ++last_call_or_plan_id,
                            .site = call_site_id(&stack),
                            .operation = *operation,
                            .is_captured = is_captured};
    if (communicator)
        add_nccl_call(communicator, group, &call);
    pthread_mutex_unlock(&recorder_lock);
    return call.id;
}

/* --- plans --------------------------------------------------------------------------------------- */

static nccl_plan *new_plan(uint32_t communicator_number)
{
    nccl_plan *plan = calloc(1, sizeof *plan), **link = &plans;
    if (!plan)
        return NULL;
    plan->id = ++last_call_or_plan_id;
    plan->communicator_number = communicator_number;
    while (*link)
        link = &(*link)->next;
    return *link = plan;
}

static nccl_plan *find_plan(uint64_t plan_id)
{
    nccl_plan *plan = plan_id ? plans : NULL;
    while (plan && plan->id != plan_id)
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
 * ACCESSED record, which ends the launch, comes first; each operation of NCCL then gets a COLLECTIVE record. */
static void write_plan(nccl_plan *plan)
{
    record rec = plan->launch;
    rec.kind = KIND_ACCESSED;
    memset(rec.kind_fields, 0, sizeof rec.kind_fields);
    rec.accessed.exact = plan->operation_count > 0;
    record_append(&rec);
    for (size_t i = 0; i < plan->operation_count; i++) {
        record *operation = plan->operations + i;
        uint32_t call_site_of_operation = operation->site;
        rec.kind = KIND_COLLECTIVE;
        rec.site = call_site_of_operation ? call_site_of_operation : plan->launch.site;
        rec.collective = operation->collective;
        rec.collective.name = plan->launch.launch.name;
        record_append(&rec);
    }
    if (!plan->operation_count)
        record_gap(UNKNOWN_BUFFERS "NCCL did not report them");
    remove_plan(plan);
}

/* Return the operations of a captured node; a new node has none. Return NULL if no memory is left. */
static node_operations *node_operations_of(CUgraphNode node)
{
    const uint64_t key = (uint64_t)(uintptr_t)node;
    uint32_t index = hash_table_get(&captured_node_indices, key);
    if (index)
        return captured_nodes + index - 1;
    node_operations *new_nodes = array_reserve(captured_nodes, &captured_node_capacity, captured_node_count + 1,
                                               sizeof *captured_nodes, 16);
    if (!new_nodes)
        return NULL;
    captured_nodes = new_nodes;
    if (hash_table_put(&captured_node_indices, key, (uint32_t)captured_node_count + 1))
        return NULL;
    captured_nodes[captured_node_count] = (node_operations){NULL, 0};
    return captured_nodes + captured_node_count++;
}

/* Move the operations of a captured plan to its graph node, and remove the plan. */
static void store_captured_plan(nccl_plan *plan)
{
    node_operations *operations = node_operations_of(plan->node);
    if (operations) {
        free(operations->operations);
        *operations = (node_operations){plan->operations, plan->operation_count};
        plan->operations = NULL;
    }
    remove_plan(plan);
}

/* Write the plan of a launch, or store the plan of a captured node, if NCCL has reported all its buffers. */
static void finish_plan(nccl_plan *plan)
{
    if (plan->is_replay) {
        record_gap(UNKNOWN_BUFFERS "captured into a graph, between several hosts");
        remove_plan(plan);
    } else if (plan->launch.kind && plan->report_has_ended) {
        write_plan(plan);
    } else if (plan->node && plan->report_has_ended) {
        store_captured_plan(plan);
    }
}

void communicator_close(uint32_t communicator_number)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_communicator *communicator = find_communicator(communicator_number);
    if (communicator && communicator->profiler_version) {
        communicators_without_calls -= communicator->profiler_version < NCCL_VERSION_WITH_CALLS;
        communicator->profiler_version = 0;
    }
    for (nccl_plan *plan = plans, *next_plan; plan; plan = next_plan) {
        next_plan = plan->next;
        if (plan->communicator_number != communicator_number)
            continue;
        if (plan->launch.kind)
            write_plan(plan);
        else
            remove_plan(plan);
    }
    pthread_mutex_unlock(&recorder_lock);
}

/* Return the first plan of a communicator that waits for its launch, after NCCL reported its buffers; without
 * ``has_report``, return the first plan that was launched and waits for the report of its buffers. */
static nccl_plan *first_waiting_plan(uint32_t communicator_number, bool has_report)
{
    nccl_plan *plan = plans;
    while (plan && (plan->communicator_number != communicator_number || plan->has_report != has_report ||
                    plan->node || plan->is_replay || (plan->launch.kind != 0) == has_report))
        plan = plan->next;
    return plan;
}

uint64_t collective_launch_begin(uint32_t communicator_number)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_plan *plan = first_waiting_plan(communicator_number, true);
    if (!plan)
        plan = new_plan(communicator_number);
    uint64_t plan_id = plan ? plan->id : 0;
    last_plan_id = plan_id;
    is_in_launch = true;
    pthread_mutex_unlock(&recorder_lock);
    return plan_id;
}

bool collectives_is_launching(void)
{
    return is_in_launch;
}

void collective_launch_end(uint64_t plan_id)
{
    pthread_mutex_lock(&recorder_lock);
    is_in_launch = false;
    nccl_plan *plan = find_plan(plan_id);
    if (plan && !plan->launch.kind && !plan->node) { /* the launch failed, or the recorder did not record it */
        last_plan_id = 0;
        remove_plan(plan);
    } else if (plan) {
        finish_plan(plan);
    }
    pthread_mutex_unlock(&recorder_lock);
}

uint64_t collective_report_begin(uint32_t communicator_number)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_plan *plan = find_plan(last_plan_id);
    last_plan_id = 0;
    if (!plan || (plan->communicator_number && plan->communicator_number != communicator_number) ||
        plan->has_report)
        plan = first_waiting_plan(communicator_number, false);
    if (!plan)
        plan = new_plan(communicator_number); /* a host function reports the buffers before the launch */
    if (plan) {
        plan->communicator_number = communicator_number;
        plan->has_report = true;
    }
    uint64_t plan_id = plan ? plan->id : 0;
    pthread_mutex_unlock(&recorder_lock);
    return plan_id;
}

void collective_report_end(uint64_t plan_id)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_plan *plan = find_plan(plan_id);
    nccl_communicator *communicator = plan ? find_communicator(plan->communicator_number) : NULL;
    const bool has_launch = plan && (plan->launch.kind || plan->node);
    if (communicator && !has_launch && communicator->profiler_version < NCCL_VERSION_WITH_CALLS) {
        if (plan->operation_count) /* if the communicator is closed, the report has no operations */
            record_gaps(UNKNOWN_BUFFERS "the stream is not reported by this version of NCCL",
                        plan->operation_count);
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
    const bool holds_part_of_each_rank =
        operation->function == COLLECTIVE_ALL_GATHER || operation->function == COLLECTIVE_REDUCE_SCATTER;
    const uint64_t part_count =
        holds_part_of_each_rank && communicator->rank_count > 0 ? (uint64_t)communicator->rank_count : 1;
    return operation->element_count * part_count * ELEMENT_BYTES[operation->datatype];
}

void collective_add_to_plan(uint64_t plan_id, uint64_t call_id, const collective *operation)
{
    pthread_mutex_lock(&recorder_lock);
    nccl_plan *plan = find_plan(plan_id);
    nccl_call *call = find_nccl_call(call_id);
    nccl_communicator *communicator = plan ? find_communicator(plan->communicator_number) : NULL;
    if (call && call->is_captured && plan && !plan->node)
        plan->is_replay = true;
    record *new_operations = communicator ? array_reserve(plan->operations, &plan->operation_capacity,
                                                          plan->operation_count + 1, sizeof *new_operations, 1)
                                          : NULL;
    if (new_operations) {
        /* NCCL reports the sizes of some collectives in bytes. The call has the number of elements. */
        const collective *counted_operation =
            call && call->operation.function == operation->function ? &call->operation : operation;
        plan->operations = new_operations;
        record *rec = new_operations + plan->operation_count++;
        memset(rec, 0, sizeof *rec);
        rec->site = call ? call->site : 0;
        rec->collective.send = operation->send_address;
        rec->collective.receive = operation->receive_address;
        /* NCCL reports the buffers after the launch, so the order of their accesses and other work is unknown here. */
        const uint64_t buffer_bytes = largest_buffer_bytes(communicator, counted_operation);
        allocations_mark_contested(operation->send_address, operation->send_address + buffer_bytes);
        allocations_mark_contested(operation->receive_address, operation->receive_address + buffer_bytes);
        rec->collective.element_count = counted_operation->element_count;
        rec->collective.communicator = plan->communicator_number;
        rec->collective.sequence = call ? call->call_number : ++communicator->operation_count;
        rec->collective.group = call ? call->group_number : group_number(communicator, plan->id);
        rec->collective.root = operation->root;
        rec->collective.function = operation->function;
        rec->collective.datatype = counted_operation->datatype;
    }
    if (call && !call->is_captured)
        remove_nccl_call(call);
    pthread_mutex_unlock(&recorder_lock);
}

void collective_count_unreported(const char *reason)
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

bool is_nccl_kernel(const char *function_name)
{
    if (!function_name)
        return false;
    if (has_prefix(function_name, "_Z")) /* in a mangled name, the length of the name follows */
        for (function_name += 2; isdigit((unsigned char)*function_name);)
            function_name++;
    return has_prefix(function_name, "ncclDevKernel") || has_prefix(function_name, "ncclKernel") ||
           has_prefix(function_name, "ncclSym");
}

/* End the plan of the last kernel of NCCL that this thread launched, if NCCL did not announce the launch: NCCL has not
 * reported the buffers on this thread. */
static void end_unannounced_plan(void)
{
    nccl_plan *plan = find_plan(last_plan_id);
    last_plan_id = 0;
    if (plan && !plan->communicator_number && plan->launch.kind)
        write_plan(plan);
}

/* Return a new plan for a launch that NCCL did not announce, because the version of NCCL is old. Return NULL if all
 * communicators announce their launches, or no memory is left. */
static nccl_plan *new_unannounced_plan(void)
{
    end_unannounced_plan();
    nccl_plan *plan = communicators_without_calls ? new_plan(0) : NULL;
    if (plan)
        last_plan_id = plan->id;
    return plan;
}

bool collectives_assign_launch(const record *launch_record)
{
    nccl_plan *plan = is_in_launch ? find_plan(last_plan_id) : new_unannounced_plan();
    if (plan && !plan->launch.kind) {
        plan->launch = *launch_record;
        return true;
    }
    record_gap_detail(UNKNOWN_BUFFERS, plugin_refusal       ? plugin_refusal
                                       : communicator_count ? "NCCL does not report this kind of operation"
                                                            : "NCCL loaded no profiler plugin");
    return false;
}

void collectives_end_unannounced_plan(void)
{
    if (!last_plan_id || is_in_launch)
        return;
    pthread_mutex_lock(&recorder_lock);
    const nccl_plan *plan = find_plan(last_plan_id);
    if (plan && !plan->communicator_number)
        end_unannounced_plan();
    pthread_mutex_unlock(&recorder_lock);
}

/* --- graphs -------------------------------------------------------------------------------------- */

void collectives_assign_node(CUgraphNode node)
{
    if (captured_node_count)
        hash_table_remove(&captured_node_indices, (uint64_t)(uintptr_t)node);
    nccl_plan *plan = is_in_launch ? find_plan(last_plan_id) : NULL;
    if (plan)
        plan->node = node;
}

bool collectives_write_node(CUgraphNode handle, const record *node_record)
{
    uint32_t index = hash_table_get(&captured_node_indices, (uint64_t)(uintptr_t)handle);
    if (!index)
        return false;
    const node_operations *node_entry = captured_nodes + index - 1;
    for (size_t i = 0; i < node_entry->operation_count; i++) {
        record rec = *node_record;
        rec.kind = KIND_COLLECTIVE;
        memset(rec.kind_fields, 0, sizeof rec.kind_fields);
        rec.site = node_entry->operations[i].site ? node_entry->operations[i].site : rec.site;
        rec.collective = node_entry->operations[i].collective;
        rec.collective.graph = node_record->node.graph;
        rec.collective.node = node_record->node.node;
        rec.collective.name = node_record->node.name;
        record_append(&rec);
    }
    return true;
}

void collectives_set_refusal(const char *reason)
{
    plugin_refusal = reason;
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
    last_plan_id = 0;
    is_in_launch = false;
    while (plans)
        remove_plan(plans);
    communicator_count = nccl_call_count = captured_node_count = 0;
    communicators_without_calls = 0;
    hash_table_clear(&nccl_call_indices);
    hash_table_clear(&captured_node_indices);
}
