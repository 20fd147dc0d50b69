/* Objects of the program that a graph keeps alive. Their destructors run without any lock held. */
#include "graph.h"

struct CUuserObject_st {
    uint32_t magic;
    CUhostFn destroy;
    void *data;
    unsigned int count;
    CUuserObject next; /* the next in the list of objects whose last reference was dropped */
};

static CUuserObject g_ended;

static bool is_object(CUuserObject object)
{
    return object != NULL && object->magic == CU_OBJECT;
}

void cu_object_keep(CUuserObject object, unsigned int count)
{
    object->count += count;
}

void cu_object_drop(CUuserObject object, unsigned int count)
{
    object->count -= count < object->count ? count : object->count;
    if (object->count > 0)
        return;
    object->magic = CU_DEAD;
    object->next = g_ended;
    g_ended = object;
}

void cu_objects_run(void)
{
    cu_lock();
    CUuserObject ended = g_ended;
    g_ended = NULL;
    cu_unlock();
    while (ended != NULL) {
        CUuserObject object = ended;
        ended = object->next;
        object->destroy(object->data);
        free(object);
    }
}

CUresult cuUserObjectCreate(CUuserObject *out, void *data, CUhostFn destroy, unsigned int count, unsigned int flags)
{
    CU_TRY(cu_enter("cuUserObjectCreate"));
    CU_CHECK(out != NULL && destroy != NULL && count > 0 && flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
             CUDA_ERROR_INVALID_VALUE);
    CUuserObject object = calloc(1, sizeof(*object));
    CU_CHECK(object != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *object = (struct CUuserObject_st){CU_OBJECT, destroy, data, count, NULL};
    *out = object;
    return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned int count)
{
    CU_TRY(cu_enter("cuUserObjectRetain"));
    CU_CHECK(is_object(object) && count > 0, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    cu_object_keep(object, count);
    cu_unlock();
    return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count)
{
    CU_TRY(cu_enter("cuUserObjectRelease"));
    CU_CHECK(is_object(object) && count > 0, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    cu_object_drop(object, count);
    cu_unlock();
    cu_objects_run();
    return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags)
{
    CU_TRY(cu_enter("cuGraphRetainUserObject"));
    CU_CHECK(cu_is_graph(graph) && is_object(object) && count > 0 && flags <= CU_GRAPH_USER_OBJECT_MOVE,
             CUDA_ERROR_INVALID_VALUE);
    struct cu_kept_object *kept = calloc(1, sizeof(*kept));
    CU_CHECK(kept != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    cu_lock();
    *kept = (struct cu_kept_object){object, count, graph->objects};
    graph->objects = kept;
    if (flags != CU_GRAPH_USER_OBJECT_MOVE)
        cu_object_keep(object, count);
    cu_unlock();
    return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count)
{
    CU_TRY(cu_enter("cuGraphReleaseUserObject"));
    CU_CHECK(cu_is_graph(graph) && is_object(object) && count > 0, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    struct cu_kept_object **at = &graph->objects;
    while (*at != NULL && ((*at)->object != object || (*at)->count < count))
        at = &(*at)->next;
    bool found = *at != NULL;
    if (found) {
        struct cu_kept_object *kept = *at;
        kept->count -= count;
        cu_object_drop(object, count);
        if (kept->count == 0) {
            *at = kept->next;
            free(kept);
        }
    }
    cu_unlock();
    cu_objects_run();
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
