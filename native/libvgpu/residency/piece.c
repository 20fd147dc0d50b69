#include "piece.h"

#include <pthread.h>

#include "functions.h"
#include "in_child.h"

static struct vgpu_piece *pieces;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list */

struct vgpu_piece *vgpu_pieces(void)
{
    return pieces;
}

void vgpu_piece_link(struct vgpu_piece *piece)
{
    pthread_mutex_lock(&lock);
    piece->next = pieces;
    piece->from = &pieces;
    if (pieces != NULL)
        pieces->from = &piece->next;
    pieces = piece;
    pthread_mutex_unlock(&lock);
}

/* With the lock held. */
static void unlink_piece(struct vgpu_piece *piece)
{
    *piece->from = piece->next;
    if (piece->next != NULL)
        piece->next->from = piece->from;
}

void vgpu_piece_unlink(struct vgpu_piece *piece)
{
    pthread_mutex_lock(&lock);
    unlink_piece(piece);
    pthread_mutex_unlock(&lock);
}

struct vgpu_piece *vgpu_piece_find(bool (*match)(const struct vgpu_piece *piece, void *argument), void *argument,
                                   bool take)
{
    pthread_mutex_lock(&lock);
    struct vgpu_piece *piece = pieces;
    while (piece != NULL && !match(piece, argument))
        piece = piece->next;
    if (piece != NULL && take)
        unlink_piece(piece);
    pthread_mutex_unlock(&lock);
    return piece;
}

CUresult vgpu_chunk_map(struct vgpu_piece *piece, unsigned chunk)
{
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = piece->device}};
    CUmemAccessDesc access = {.location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    uint64_t bytes = vgpu_chunk_bytes(piece, chunk);
    CUdeviceptr base = vgpu_chunk_base(piece, chunk);
    CUresult result = CALL(cuMemCreate, &handle, bytes, &prop, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = CALL(cuMemMap, base, bytes, 0, handle, 0);
    if (result == CUDA_SUCCESS) {
        result = CALL(cuMemSetAccess, base, bytes, &access, 1);
        if (result != CUDA_SUCCESS)
            CALL(cuMemUnmap, base, bytes);
    }
    if (result != CUDA_SUCCESS)
        CALL(cuMemRelease, handle);
    else
        piece->chunks[chunk].handle = handle;
    return result;
}

void vgpu_chunk_unmap(struct vgpu_piece *piece, unsigned chunk)
{
    CALL(cuMemUnmap, vgpu_chunk_base(piece, chunk), vgpu_chunk_bytes(piece, chunk));
    CALL(cuMemRelease, piece->chunks[chunk].handle);
    piece->chunks[chunk].handle = 0;
}

static void reset(void)
{
    pieces = NULL;
    pthread_mutex_init(&lock, NULL);
}
VGPU_IN_CHILD(reset);
