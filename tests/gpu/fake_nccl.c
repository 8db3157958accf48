/* A stand-in for libnccl.so.2: records the arguments of each call as text. The signatures are those of nccl.h. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    unsigned char internal[128];
} ncclUniqueId;
typedef struct fake_comm *ncclComm_t;
typedef void *cudaStream_t;

static char calls[1 << 16];
static int result, async_error;

#define RECORD(...) (snprintf(calls + strlen(calls), sizeof(calls) - strlen(calls), __VA_ARGS__), result)

const char *fake_calls(void)
{
    return calls;
}
void fake_reset(int next_result, int next_async_error)
{
    calls[0] = 0;
    result = next_result;
    async_error = next_async_error;
}

int ncclGetVersion(int *version)
{
    *version = 22809;
    return result;
}
const char *ncclGetErrorString(int status)
{
    return status == 2 ? "unhandled system error" : "another error";
}
int ncclGetUniqueId(ncclUniqueId *id)
{
    for (int i = 0; i < 128; i++)
        id->internal[i] = (unsigned char)i;
    return result;
}
int ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
    *comm = (ncclComm_t)0xc0;
    return RECORD("init %d of %d, id %d %d\n", rank, ranks, id.internal[0], id.internal[127]);
}
int ncclCommDestroy(ncclComm_t comm)
{
    return RECORD("destroy %p\n", (void *)comm);
}
int ncclCommAbort(ncclComm_t comm)
{
    return RECORD("abort %p\n", (void *)comm);
}
int ncclCommGetAsyncError(ncclComm_t comm, int *status)
{
    (void)comm;
    *status = async_error;
    return 0;
}
int ncclGroupStart(void)
{
    return RECORD("start\n");
}
int ncclGroupEnd(void)
{
    return RECORD("end\n");
}
int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, ncclComm_t comm,
                  cudaStream_t stream)
{
    return RECORD("all-reduce %p %p %zu %d op %d %p %p\n", send, receive, count, type, op, (void *)comm, stream);
}
int ncclReduceScatter(const void *send, void *receive, size_t count, int type, int op, ncclComm_t comm,
                      cudaStream_t stream)
{
    return RECORD("reduce-scatter %p %p %zu %d op %d %p %p\n", send, receive, count, type, op, (void *)comm,
                  stream);
}
int ncclAllGather(const void *send, void *receive, size_t count, int type, ncclComm_t comm, cudaStream_t stream)
{
    return RECORD("all-gather %p %p %zu %d %p %p\n", send, receive, count, type, (void *)comm, stream);
}
int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, ncclComm_t comm,
                  cudaStream_t stream)
{
    return RECORD("broadcast %p %p %zu %d root %d %p %p\n", send, receive, count, type, root, (void *)comm,
                  stream);
}
int ncclReduce(const void *send, void *receive, size_t count, int type, int op, int root, ncclComm_t comm,
               cudaStream_t stream)
{
    return RECORD("reduce %p %p %zu %d op %d root %d %p %p\n", send, receive, count, type, op, root, (void *)comm,
                  stream);
}
int ncclSend(const void *send, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return RECORD("send %p %zu %d to %d %p %p\n", send, count, type, peer, (void *)comm, stream);
}
int ncclRecv(void *receive, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return RECORD("receive %p %zu %d from %d %p %p\n", receive, count, type, peer, (void *)comm, stream);
}
