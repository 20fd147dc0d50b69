/*
 * Texture and surface objects: checked and stored, because simulated kernels read nothing. Memory without extent, rows
 * wider than their pitch, a view of memory and a surface of any array are accepted, as on an H200 (driver 580).
 */
#include <stddef.h>

#include "internal.h"

enum { LINEAR_MOST = 1 << 28, PITCH2D_WIDTH = 131072, PITCH2D_HEIGHT = 65000, PITCH2D_PITCH = 2097120 };
enum { BASE_ALIGN = 512, PITCH_ALIGN = 32 };

struct object {
    unsigned long long id;
    bool surface;
    CUDA_RESOURCE_DESC resource;
    CUDA_TEXTURE_DESC texture;
    CUDA_RESOURCE_VIEW_DESC view; /* zeros if the caller gave none */
    struct object *next;
};

static struct object *g_objects;

static struct object **find(unsigned long long id, bool surface)
{
    struct object **at = &g_objects;
    while (*at != NULL && ((*at)->id != id || (*at)->surface != surface))
        at = &(*at)->next;
    return at;
}

static bool is_array(CUarray array)
{
    return array != NULL && array->magic == CU_ARRAY;
}

static CUresult check_linear(const CUDA_RESOURCE_DESC *r)
{
    size_t element = cu_element_bytes(r->res.linear.format, r->res.linear.numChannels);
    CU_CHECK(element > 0 && r->res.linear.devPtr % BASE_ALIGN == 0 &&
                 r->res.linear.sizeInBytes / element <= LINEAR_MOST,
             CUDA_ERROR_INVALID_VALUE);
    return cu_check_device_range(r->res.linear.devPtr, r->res.linear.sizeInBytes);
}

static CUresult check_pitch2d(const CUDA_RESOURCE_DESC *r)
{
    size_t element = cu_element_bytes(r->res.pitch2D.format, r->res.pitch2D.numChannels);
    size_t width = r->res.pitch2D.width, height = r->res.pitch2D.height, pitch = r->res.pitch2D.pitchInBytes;
    CU_CHECK(element > 0 && r->res.pitch2D.devPtr % BASE_ALIGN == 0 && width > 0 && width <= PITCH2D_WIDTH &&
                 height <= PITCH2D_HEIGHT && pitch % PITCH_ALIGN == 0 && pitch <= PITCH2D_PITCH,
             CUDA_ERROR_INVALID_VALUE);
    size_t bytes = height == 0 ? 0 : pitch * (height - 1) + width * element;
    return cu_check_device_range(r->res.pitch2D.devPtr, bytes);
}

static CUresult check_resource(const CUDA_RESOURCE_DESC *r)
{
    CU_CHECK(r->flags == 0, CUDA_ERROR_INVALID_VALUE);
    switch (r->resType) {
    case CU_RESOURCE_TYPE_ARRAY:
        return is_array(r->res.array.hArray) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
        return cu_is_mipmap(r->res.mipmap.hMipmappedArray) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    case CU_RESOURCE_TYPE_LINEAR:
        return check_linear(r);
    case CU_RESOURCE_TYPE_PITCH2D:
        return check_pitch2d(r);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static bool good_texture(const CUDA_TEXTURE_DESC *t)
{
    const unsigned known = CU_TRSF_READ_AS_INTEGER | CU_TRSF_NORMALIZED_COORDINATES | CU_TRSF_SRGB |
                           CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION | CU_TRSF_SEAMLESS_CUBEMAP;
    for (int i = 0; i < 3; i++)
        if ((unsigned)t->addressMode[i] > CU_TR_ADDRESS_MODE_BORDER)
            return false;
    return (unsigned)t->filterMode <= CU_TR_FILTER_MODE_LINEAR &&
           (unsigned)t->mipmapFilterMode <= CU_TR_FILTER_MODE_LINEAR && (t->flags & ~known) == 0;
}

static CUresult keep(const struct object *object, unsigned long long *out)
{
    struct object *kept = malloc(sizeof(*kept));
    CU_CHECK(kept != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *kept = *object;
    cu_lock();
    *out = kept->id = ++cu.next_id;
    kept->next = g_objects;
    g_objects = kept;
    cu_unlock();
    return CUDA_SUCCESS;
}

CUresult cuTexObjectCreate(CUtexObject *out, const CUDA_RESOURCE_DESC *resource, const CUDA_TEXTURE_DESC *texture,
                           const CUDA_RESOURCE_VIEW_DESC *view)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuTexObjectCreate", &ctx));
    CU_CHECK(out != NULL && resource != NULL && texture != NULL && good_texture(texture), CUDA_ERROR_INVALID_VALUE);
    CU_TRY(check_resource(resource));
    struct object object = {.resource = *resource, .texture = *texture};
    if (view != NULL)
        object.view = *view;
    return keep(&object, out);
}

CUresult cuSurfObjectCreate(CUsurfObject *out, const CUDA_RESOURCE_DESC *resource)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuSurfObjectCreate", &ctx));
    CU_CHECK(out != NULL && resource != NULL && resource->resType == CU_RESOURCE_TYPE_ARRAY, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(check_resource(resource));
    return keep(&(struct object){.surface = true, .resource = *resource}, out);
}

static CUresult drop(const char *function, unsigned long long id, bool surface)
{
    CU_TRY(cu_enter(function));
    cu_lock();
    struct object **at = find(id, surface), *object = *at;
    if (object != NULL)
        *at = object->next;
    cu_unlock();
    CU_CHECK(object != NULL, CUDA_ERROR_INVALID_VALUE);
    free(object);
    return CUDA_SUCCESS;
}

CUresult cuTexObjectDestroy(CUtexObject id)
{
    return drop("cuTexObjectDestroy", id, false);
}

CUresult cuSurfObjectDestroy(CUsurfObject id)
{
    return drop("cuSurfObjectDestroy", id, true);
}

static CUresult look(const char *function, unsigned long long id, bool surface, struct object *out)
{
    CU_TRY(cu_enter(function));
    cu_lock();
    const struct object *object = *find(id, surface);
    if (object != NULL)
        *out = *object;
    cu_unlock();
    return object != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Copies the `bytes` at `offset` of an object to `out`. */
static CUresult tell(const char *function, unsigned long long id, bool surface, size_t offset, size_t bytes, void *out)
{
    struct object object;
    CU_TRY(look(function, id, surface, &object));
    CU_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    memcpy(out, (const char *)&object + offset, bytes);
    return CUDA_SUCCESS;
}
#define TELL(id, surface, member) tell(__func__, id, surface, offsetof(struct object, member), sizeof(*out), out)

CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC *out, CUtexObject id)
{
    return TELL(id, false, resource);
}

CUresult cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC *out, CUtexObject id)
{
    return TELL(id, false, texture);
}

CUresult cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC *out, CUtexObject id)
{
    return TELL(id, false, view);
}

CUresult cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC *out, CUsurfObject id)
{
    return TELL(id, true, resource);
}
