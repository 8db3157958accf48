#include "profile/resources.h"

#include <pthread.h>

#include "containers.h"
#include "hooks/driver_api.h"
#include "profile/activity.h"
#include "profile/library.h"
#include "recorder.h"
#include "write/call_sites.h"
#include "write/spool.h"

static const uint32_t CALLBACKS[] = {
    CUPTI_RESOURCE_CONTEXT_CREATED,
    CUPTI_RESOURCE_CONTEXT_DESTROY_STARTING,
    CUPTI_RESOURCE_MODULE_UNLOAD_STARTING,
    CUPTI_RESOURCE_GRAPHNODE_CREATED,
    CUPTI_RESOURCE_GRAPHNODE_DESTROY_STARTING,
    CUPTI_RESOURCE_GRAPHNODE_CLONED,
};

/* Id of the call site of each graph node, by the number of the node. A node without call site has the value NO_SITE,
 * because value 0 means "no entry". Protected by the recorder lock. */
static hash_table node_sites;
#define NO_SITE UINT32_MAX

int resources_enable(CUpti_SubscriberHandle subscriber, bool enable)
{
    int result = 0;
    for (size_t i = 0; i < sizeof CALLBACKS / sizeof *CALLBACKS && !result; i++)
        result = cupti.enable_callback(enable, subscriber, CUPTI_DOMAIN_RESOURCE, CALLBACKS[i]);
    return result;
}

/* Store the device of a new context, for records of API calls. */
static void on_context_created(CUcontext context)
{
    uint32_t context_number, device;
    if (cupti.context_id(context, &context_number) || cupti.device_id(context, &device))
        return;
    pthread_mutex_lock(&recorder_lock);
    set_context_device(context_number, (CUdevice)device);
    pthread_mutex_unlock(&recorder_lock);
}

static bool is_recorded_node(int type)
{
    return type == NODE_KERNEL || type == NODE_MEMCPY || type == NODE_MEMSET;
}

/* Write the call site of a node, and keep it for copies of the node. The recorder lock is held. */
static void record_site(uint64_t node, uint32_t site)
{
    hash_table_put(&node_sites, node, site ? site : NO_SITE);
    record rec = record_begin(KIND_GRAPH_NODE_SITE, 0, 0, site);
    rec.graph_node_site.graph_node = node;
    record_append(&rec);
}

static void on_node_created(const CUpti_GraphData *graph)
{
    uint64_t node;
    call_site stack;
    if (!is_recorded_node(graph->nodeType) || cupti.graph_node_id(graph->node, &node) || !node)
        return;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    record_site(node, call_site_id(&stack));
    pthread_mutex_unlock(&recorder_lock);
}

/* The nodes of an executable graph are copies of those of the captured graph, with numbers of their own. */
static void on_node_cloned(const CUpti_GraphData *graph)
{
    uint64_t node, original_node;
    if (!is_recorded_node(graph->nodeType) || cupti.graph_node_id(graph->node, &node) || !node ||
        cupti.graph_node_id(graph->originalNode, &original_node))
        return;
    pthread_mutex_lock(&recorder_lock);
    const uint32_t site = hash_table_get(&node_sites, original_node);
    if (site)
        record_site(node, site == NO_SITE ? 0 : site);
    pthread_mutex_unlock(&recorder_lock);
}

static void on_node_destroyed(const CUpti_GraphData *graph)
{
    uint64_t node;
    if (!is_recorded_node(graph->nodeType) || cupti.graph_node_id(graph->node, &node) || !node)
        return;
    pthread_mutex_lock(&recorder_lock);
    hash_table_remove(&node_sites, node);
    pthread_mutex_unlock(&recorder_lock);
}

void resources_on_callback(uint32_t cbid, const CUpti_ResourceData *data)
{
    const CUpti_GraphData *graph = data->resourceDescriptor;
    switch (cbid) {
    case CUPTI_RESOURCE_CONTEXT_CREATED: on_context_created(data->context); break;
    case CUPTI_RESOURCE_CONTEXT_DESTROY_STARTING: activity_flush(); break;
    case CUPTI_RESOURCE_MODULE_UNLOAD_STARTING: activity_forget_names(); break;
    case CUPTI_RESOURCE_GRAPHNODE_CREATED:
        if (graph)
            on_node_created(graph);
        break;
    case CUPTI_RESOURCE_GRAPHNODE_CLONED:
        if (graph)
            on_node_cloned(graph);
        break;
    case CUPTI_RESOURCE_GRAPHNODE_DESTROY_STARTING:
        if (graph)
            on_node_destroyed(graph);
        break;
    }
}

void resources_forked(void)
{
    hash_table_clear(&node_sites);
}
