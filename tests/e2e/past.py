"""A tenant whose calls libvgpu does not see, and one whose threads wait for all kinds of things."""

#: Calls the driver's own function for each line of input, "past", by its address: as from a private table.
PAST = """
import ctypes as c, json, mmap, struct, sys
u = c.CDLL("libcuda.so.1")
def say(**words):
    sys.stdout.write(json.dumps(words) + "\\n")
    sys.stdout.flush()
def checked(code):
    if code: sys.exit(f"the driver answers {code}")
def address(wanted):  # the driver's file has it at its place in the symbol table
    for line in open("/proc/self/maps"):
        path = line.split(None, 5)[-1].strip()
        if path.rpartition("/")[2].startswith("libcuda.so."): break
    base = int(line.partition("-")[0], 16)
    with open(path, "rb") as file:
        image = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    table, = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQII", image, table + n * size) for n in range(count)]
    symbols = next(one for one in sections if one[1] == 11)
    names = sections[symbols[6]][4]
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", image, at)
        if image[names + name:names + name + len(wanted) + 1] == wanted + b"\\0":
            return base + value
context, memory = c.c_void_p(), c.c_uint64()
checked(u.cuInit(0))
checked(u.cuDevicePrimaryCtxRetain(c.byref(context), 0))
checked(u.cuCtxSetCurrent(context))
checked(u.cuMemAlloc_v2(c.byref(memory), c.c_size_t(4 << 20)))
past = c.CFUNCTYPE(c.c_int)(address(b"cuMemAlloc_v2"))
say(calls=["past"])
for line in sys.stdin:
    checked(past(c.byref(memory), c.c_size_t(4096)))
    say(done=line.strip())
"""

#: Threads that have worked and then wait, each for something else; they end with the program. For a line of
#: input one more allocates.
WAITS = """
import ctypes as c, json, os, select, sys, threading, time
u, libc = c.CDLL("libcuda.so.1"), c.CDLL(None)
def say(**words):
    sys.stdout.write(json.dumps(words) + "\\n")
    sys.stdout.flush()
context, memory = c.c_void_p(), c.c_uint64()
u.cuInit(0)
u.cuDevicePrimaryCtxRetain(c.byref(context), 0)
u.cuCtxSetCurrent(context)
u.cuMemAlloc_v2(c.byref(memory), c.c_size_t(4 << 20))
held, condition, event = threading.Lock(), threading.Condition(), threading.Event()
mutex, rwlock, semaphore, ptcond = (c.create_string_buffer(256) for _ in range(4))
held.acquire()
libc.pthread_mutex_lock(mutex)
libc.pthread_rwlock_wrlock(rwlock)
read, _write = os.pipe()
def wait_condition():
    with condition: condition.wait()
def wait_ptcond():
    own = c.create_string_buffer(256)
    libc.pthread_mutex_lock(own)
    libc.pthread_cond_wait(ptcond, own)
forever = threading.Thread(target=lambda: time.sleep(1000), daemon=True)
waits = [
    held.acquire, wait_condition, event.wait, lambda: event.wait(1000), lambda: time.sleep(1000),
    lambda: os.read(read, 1), lambda: select.select([read], [], []), lambda: select.epoll().poll(),
    lambda: libc.pthread_mutex_lock(mutex), lambda: libc.pthread_rwlock_rdlock(rwlock),
    lambda: libc.pthread_rwlock_wrlock(rwlock), lambda: libc.sem_wait(semaphore), wait_ptcond, forever.join,
]
def work(then):
    u.cuCtxSetCurrent(context)
    u.cuMemsetD8_v2(memory, c.c_ubyte(7), c.c_size_t(4096))
    u.cuCtxSynchronize()
    ready.release()
    then()
ready = threading.Semaphore(0)
forever.start()
for then in waits: threading.Thread(target=work, args=(then,), daemon=True).start()
for _ in waits: ready.acquire()
say(waits=len(waits))
def allocate():
    u.cuCtxSetCurrent(context)
    code = u.cuMemAlloc_v2(c.byref(memory), c.c_size_t(4096))
    say(code=code)
for _ in sys.stdin:
    threading.Thread(target=allocate, daemon=True).start()
os._exit(0)
"""
