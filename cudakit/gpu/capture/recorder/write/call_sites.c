#include "write/call_sites.h"

#include <string.h>

#include "containers.h"
#include "write/spool.h"

static const struct ck_walker *walker;
static table known_ids; /* by hash */

void call_sites_set_walker(const struct ck_walker *new_walker)
{
    walker = new_walker;
}

void call_site_here(call_site *here)
{
    uint64_t keys[MAX_FRAMES];
    here->depth = walker ? walker->walk(keys, here->code, here->offset, MAX_FRAMES) : 0;
    uint64_t hash = 0;
    for (int i = 0; i < here->depth; i++)
        hash = (hash ^ keys[i]) * 0x9E3779B97F4A7C15ull + (hash >> 29);
    here->hash = hash ? hash : 1;
}

static uint32_t write_stack(const call_site *here)
{
    spool_frame frames[MAX_FRAMES];
    uint32_t depth = 0;
    for (int i = 0; i < here->depth; i++) {
        struct ck_frame frame;
        if (walker->resolve(here->code[i], here->offset[i], &frame))
            continue;
        frames[depth].function = spool_text(frame.function);
        frames[depth].file = spool_text(frame.file);
        frames[depth].line = frame.line > 0 ? (uint32_t)frame.line : 0;
        depth++;
    }
    return spool_stack(frames, depth);
}

uint32_t call_site_id(const call_site *here)
{
    if (here->depth <= 0)
        return 0;
    uint32_t number = table_get(&known_ids, here->hash);
    if (!number) {
        number = write_stack(here);
        if (number)
            table_put(&known_ids, here->hash, number);
    }
    return number;
}

void call_sites_clear(void)
{
    table_clear(&known_ids);
}
