/*
 * Memory of large tensors that is used again instead of being made zero again, within a bound.
 *
 * Preloaded into a worker, it stands before the allocator for what PyTorch asks of it (posix_memalign) from 64 KiB on, as
 * soon as it is told a bound. What is freed stays with the process for the next tensor, as long as no more than the bound
 * is resident in all; then what is free goes back to the system first. Until it is told a bound, and for all that is
 * smaller, the allocator that was there answers.
 *
 * Address space is reserved without memory. It is cut into granules of some huge pages each, of which it is known whether
 * they are resident. Tensors lie in them page by page, each where it makes the fewest granules resident. Where too much
 * would be resident, a free granule's memory is moved there, as it is. A granule is writable only while it is resident, so
 * that limits of the system count what is there.
 * Small tensors have a zone of their own: one of them would keep a whole granule from going back.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define HUGE ((size_t)2 << 20)
#ifndef MREMAP_DONTUNMAP /* Linux 5.7; before it, memory is made anew */
#define MREMAP_DONTUNMAP 4
#endif
#define SMALL ((size_t)64 << 10)
#define LARGE ((size_t)1 << 20)
#define EXTENTS 65536
#define GRANULES 4096 /* at most so many are resident: each may be a mapping of its own, of which there are 65,530 */

struct extent {
    size_t start, size; /* bytes from the beginning of its zone */
    bool used;
};

struct zone {
    char *base;
    size_t size;
    char *reserved; /* and a table behind it, to be given back */
    struct extent *extents; /* all of it, in order; no two free ones touch */
    size_t count;
    uint8_t *resident; /* of each granule */
    size_t top;        /* no granule from here on was ever resident */
};

static struct zone zones[2]; /* of large tensors, and of small ones */
static size_t limit_bytes;   /* 0: nothing is served */
static size_t granule = HUGE;
static size_t resident_bytes, used_bytes, made_bytes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

static size_t up(size_t size, size_t to) { return (size + to - 1) / to * to; }
static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static size_t table_bytes(size_t size) { return up(EXTENTS * sizeof(struct extent) + size / granule, PAGE); }

/* What anybody may look up at any time is told last, and taken back first. */
static void tell(struct zone *zone, char *base, size_t size) {
    __atomic_store_n(&zone->size, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&zone->base, base, __ATOMIC_SEQ_CST);
    __atomic_store_n(&zone->size, size, __ATOMIC_SEQ_CST);
}

static bool reserve(struct zone *zone, size_t size) {
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size = up(size, granule);
    char *reserved = mmap(NULL, size + granule, PROT_NONE, how, -1, 0);
    char *table = mmap(NULL, table_bytes(size), PROT_READ | PROT_WRITE, how, -1, 0);
    if (reserved == MAP_FAILED || table == MAP_FAILED) {
        if (reserved != MAP_FAILED)
            munmap(reserved, size + granule);
        if (table != MAP_FAILED)
            munmap(table, table_bytes(size));
        return false;
    }
    zone->reserved = reserved;
    zone->extents = (struct extent *)table;
    zone->resident = (uint8_t *)(zone->extents + EXTENTS);
    zone->extents[0] = (struct extent){.start = 0, .size = size, .used = false};
    zone->count = 1;
    zone->top = 0;
    char *base = (char *)up((uintptr_t)reserved, granule);
    madvise(base, size, MADV_HUGEPAGE);
    tell(zone, base, size);
    return true;
}

/* Nothing of it is used. */
static void unreserve(struct zone *zone) {
    size_t size = zone->size;
    if (size == 0)
        return;
    tell(zone, NULL, 0);
    munmap(zone->reserved, size + granule);
    munmap(zone->extents, table_bytes(size));
}

/* The first extent that does not end before a place. */
static size_t extent_at(const struct zone *zone, size_t place) {
    size_t low = 0, high = zone->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (zone->extents[middle].start + zone->extents[middle].size <= place)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The bytes that would have to be made resident for something to lie there. */
static size_t new_bytes(const struct zone *zone, size_t start, size_t size) {
    size_t found = 0;
    for (size_t number = start / granule; number * granule < start + size; number++)
        found += zone->resident[number] ? 0 : granule;
    return found;
}

/* Where something lies best: where the least must be made resident, then in the smallest extent. */
static bool place_for(const struct zone *zone, size_t size, size_t *extent, size_t *start) {
    size_t best_new = SIZE_MAX, best_size = SIZE_MAX;
    for (size_t i = 0; i < zone->count; i++) {
        const struct extent *one = &zone->extents[i];
        if (one->used || one->size < size || (best_new == 0 && one->size >= best_size))
            continue;
        size_t last = one->start + one->size - size, until = least(last, zone->top);
        bool before = false;
        for (size_t at = one->start; at <= until || at == one->start;) {
            bool here = zone->resident[at / granule];
            if (at == one->start || here != before) { /* where a row of resident granules begins or ends */
                size_t places[2] = {at, at >= one->start + size ? at - size : at};
                for (int k = 0; k < 2; k++) {
                    size_t found = new_bytes(zone, places[k], size);
                    if (found < best_new || (found == best_new && one->size < best_size)) {
                        best_new = found, best_size = one->size;
                        *extent = i, *start = places[k];
                    }
                }
            }
            before = here;
            at = (at / granule + 1) * granule;
        }
        if (best_new > 0 && last > one->start && last < zone->top) { /* at its end, where the loop may not have come */
            size_t found = new_bytes(zone, last, size);
            if (found < best_new) {
                best_new = found, best_size = one->size;
                *extent = i, *start = last;
            }
        }
    }
    return best_new != SIZE_MAX;
}

struct part {
    struct zone *zone;
    size_t number;
};

/* A granule that is resident and free, of the narrowest place: what is wide is of more use. Not one of those to keep. */
static bool free_granule(const struct zone *keep_zone, size_t keep_start, size_t keep_size, struct part *found) {
    size_t narrowest = SIZE_MAX;
    for (int k = 0; k < 2; k++) {
        struct zone *zone = &zones[k];
        for (size_t i = 0; i < zone->count; i++) {
            const struct extent *one = &zone->extents[i];
            if (one->used || one->size >= narrowest)
                continue;
            size_t first = up(one->start, granule) / granule;
            size_t end = least(one->start + one->size, zone->top) / granule;
            for (size_t number = first; number < end; number++) {
                size_t at = number * granule;
                bool kept = zone == keep_zone && at < keep_start + keep_size && at + granule > keep_start;
                if (zone->resident[number] && !kept) {
                    *found = (struct part){zone, number};
                    narrowest = one->size;
                    break;
                }
            }
        }
    }
    return narrowest != SIZE_MAX;
}

static char *place_of(struct part one) { return one.zone->base + one.number * granule; }

static void release(struct part one) {
    madvise(place_of(one), granule, MADV_DONTNEED);
    mprotect(place_of(one), granule, PROT_NONE);
    one.zone->resident[one.number] = 0;
    resident_bytes -= granule;
}

/* Give back what is free until no more than so much is resident, or all of it is used: who counts tensors knows why. */
static void shrink(size_t to_bytes) {
    struct part one;
    while (resident_bytes > to_bytes && free_granule(NULL, 0, 0, &one))
        release(one);
}

static void note_resident(struct part one) {
    one.zone->resident[one.number] = 1;
    if (one.zone->top < (one.number + 1) * granule)
        one.zone->top = (one.number + 1) * granule;
}

static bool create(struct part one) {
    if (mprotect(place_of(one), granule, PROT_READ | PROT_WRITE) != 0)
        return false;
    note_resident(one);
    resident_bytes += granule;
    made_bytes += granule;
    return true;
}

/* The memory of a free granule goes to another place, as it is: nothing is made zero. */
static bool move(struct part from, struct part to) {
    /* Writable first, so that a limit of the system refuses it while nothing has happened: mremap unmaps the place, and
       counts what it leaves behind, before it asks for room. */
    if (mprotect(place_of(to), granule, PROT_READ | PROT_WRITE) != 0)
        return false;
    int how = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    if (mremap(place_of(from), granule, granule, how, place_of(to)) == MAP_FAILED) {
        /* If it was unmapped all the same, nobody else must get it. If it was not, this changes nothing. */
        int again = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
        mmap(place_of(to), granule, PROT_NONE, again, -1, 0);
        mprotect(place_of(to), granule, PROT_NONE);
        return false;
    }
    mprotect(place_of(from), granule, PROT_NONE);
    from.zone->resident[from.number] = 0;
    note_resident(to);
    return true;
}

static bool make_resident(struct zone *zone, size_t start, size_t size) {
    for (size_t number = start / granule; number * granule < start + size; number++) {
        struct part here = {zone, number}, spare;
        if (zone->resident[number])
            continue;
        bool full = resident_bytes + granule > limit_bytes && free_granule(zone, start, size, &spare);
        if (full && move(spare, here))
            continue;
        if (full)
            release(spare);
        if (!create(here))
            return false;
    }
    return true;
}

static void insert(struct zone *zone, size_t at, struct extent one) {
    memmove(&zone->extents[at + 1], &zone->extents[at], (zone->count - at) * sizeof one);
    zone->extents[at] = one;
    zone->count++;
}

static void erase(struct zone *zone, size_t at) {
    zone->count--;
    memmove(&zone->extents[at], &zone->extents[at + 1], (zone->count - at) * sizeof zone->extents[0]);
}

/* False if there is no place here, or the system has no more. */
static bool take(size_t size, void **found) {
    if (size == 0 || size > zones[0].size)
        return false;
    size = up(size, PAGE);
    struct zone *zone = &zones[size < LARGE];
    size_t at = 0, start = 0;
    if (zone->count + 2 > EXTENTS || !place_for(zone, size, &at, &start))
        return false;
    if (!make_resident(zone, start, size))
        return false;
    struct extent whole = zone->extents[at];
    zone->extents[at] = (struct extent){.start = start, .size = size, .used = true};
    if (start + size < whole.start + whole.size)
        insert(zone, at + 1, (struct extent){.start = start + size, .size = whole.start + whole.size - start - size});
    if (start > whole.start)
        insert(zone, at, (struct extent){.start = whole.start, .size = start - whole.start});
    used_bytes += size;
    *found = zone->base + start;
    return true;
}

static struct zone *zone_of(const void *memory) {
    for (int k = 0; k < 2; k++) {
        size_t size = __atomic_load_n(&zones[k].size, __ATOMIC_SEQ_CST);
        const char *base = __atomic_load_n(&zones[k].base, __ATOMIC_SEQ_CST);
        if ((const char *)memory >= base && (size_t)((const char *)memory - base) < size)
            return &zones[k];
    }
    return NULL;
}

static size_t size_at(struct zone *zone, const void *memory) {
    size_t start = (size_t)((const char *)memory - zone->base);
    const struct extent *one = &zone->extents[extent_at(zone, start)];
    if (one->start != start || !one->used)
        abort(); /* freed twice, or not the beginning: glibc would end the process, too */
    return one->size;
}

static void give(struct zone *zone, void *memory) {
    size_t size = size_at(zone, memory), start = (size_t)((char *)memory - zone->base);
    size_t at = extent_at(zone, start);
    zone->extents[at].used = false;
    used_bytes -= size;
    if (at + 1 < zone->count && !zone->extents[at + 1].used) {
        zone->extents[at].size += zone->extents[at + 1].size;
        erase(zone, at + 1);
    }
    if (at > 0 && !zone->extents[at - 1].used) {
        zone->extents[at - 1].size += zone->extents[at].size;
        erase(zone, at);
    }
    if (resident_bytes > limit_bytes)
        shrink(limit_bytes);
}

/* ---- what is called by name, with a lock around it ---- */

/* From now on serve what is asked for, with so much resident at most; false if no room can be reserved. */
bool rota_reservoir_hold(size_t bytes, size_t reserve_bytes) {
    pthread_mutex_lock(&lock);
    if (zones[1].size < reserve_bytes && used_bytes == 0) {
        shrink(0);
        unreserve(&zones[0]);
        unreserve(&zones[1]);
        granule = HUGE * (1 + bytes / (GRANULES * HUGE));
        if (!reserve(&zones[0], reserve_bytes) || !reserve(&zones[1], reserve_bytes))
            unreserve(&zones[0]);
    }
    bool can = zones[1].size > 0;
    limit_bytes = can ? bytes : 0;
    if (can)
        shrink(limit_bytes);
    pthread_mutex_unlock(&lock);
    return can;
}

/* Give all that is free back to the system, now. */
void rota_reservoir_trim(void) {
    pthread_mutex_lock(&lock);
    shrink(0);
    pthread_mutex_unlock(&lock);
}

/* What is resident, what is used of it, and what was made resident since the process began. */
void rota_reservoir_count(size_t counts[3]) {
    pthread_mutex_lock(&lock);
    counts[0] = resident_bytes, counts[1] = used_bytes, counts[2] = made_bytes;
    pthread_mutex_unlock(&lock);
}

/* Memory, or NULL: nothing is served, or there is no more. */
void *rota_reservoir_take(size_t size) {
    void *found = NULL;
    pthread_mutex_lock(&lock);
    if (limit_bytes == 0 || !take(size, &found))
        found = NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Whether memory lies here: what lies here can be read up to the end of its last page. */
bool rota_reservoir_has(const void *memory) { return zone_of(memory) != NULL; }

/* What `take` gave is not needed any more. */
void rota_reservoir_give(void *memory) {
    pthread_mutex_lock(&lock);
    give(zone_of(memory), memory);
    pthread_mutex_unlock(&lock);
}

/* ---- the allocator behind this one ---- */

static struct {
    void (*free)(void *);
    void *(*realloc)(void *, size_t);
    size_t (*usable_size)(void *);
    int (*memalign)(void **, size_t, size_t);
} next;
static bool next_is_known;
/* Initial-exec, because the first use of a variable of another model may allocate. Volatile, because glibc tells the
   compiler that dlsym calls nothing of this file. */
static __thread volatile bool looking __attribute__((tls_model("initial-exec")));

extern void __libc_free(void *);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static size_t unknown_size(void *memory) {
    (void)memory;
    return 0;
}

static int libc_memalign(void **found, size_t alignment, size_t size) {
    void *made = __libc_memalign(alignment, size);
    if (!made)
        return ENOMEM;
    *found = made;
    return 0;
}

/* Another library may answer for dlsym, with what follows itself. If that is this library, glibc is used. */
static void *behind(const char *name, void *ours, void *glibcs) {
    void *found = dlsym(RTLD_NEXT, name);
    return found && found != ours ? found : glibcs;
}

/*
 * Look for the allocator behind this one. False while this thread does so already: dlsym, and libraries that stand
 * before or behind this one, allocate and free meanwhile. Threads that look at the same time find the same.
 */
static bool find_next(void) {
    if (__atomic_load_n(&next_is_known, __ATOMIC_ACQUIRE))
        return true;
    if (looking)
        return false;
    int before = errno;
    looking = true;
    void *found_free = behind("free", free, __libc_free);
    void *found_realloc = behind("realloc", realloc, __libc_realloc);
    void *found_usable_size = behind("malloc_usable_size", malloc_usable_size, unknown_size);
    void *found_memalign = behind("posix_memalign", posix_memalign, libc_memalign);
    looking = false;
    __atomic_store_n((void **)&next.free, found_free, __ATOMIC_RELAXED);
    __atomic_store_n((void **)&next.realloc, found_realloc, __ATOMIC_RELAXED);
    __atomic_store_n((void **)&next.usable_size, found_usable_size, __ATOMIC_RELAXED);
    __atomic_store_n((void **)&next.memalign, found_memalign, __ATOMIC_RELAXED);
    __atomic_store_n(&next_is_known, true, __ATOMIC_RELEASE);
    errno = before;
    return true;
}

/* What a thread asks for while it looks: a size, and memory behind it. None of it is used again. */
static char early[64 << 10];
static size_t early_used;

static bool is_early(const void *memory) {
    return (const char *)memory >= early && (const char *)memory < early + sizeof early;
}

static size_t *early_size(void *memory) { return (size_t *)memory - 1; }

static int take_early(void **found, size_t alignment, size_t size) {
    if (alignment < sizeof(size_t) || (alignment & (alignment - 1)) != 0)
        return EINVAL;
    if (alignment > PAGE || size > sizeof early)
        return ENOMEM;
    size_t room = sizeof(size_t) + alignment + size;
    size_t at = __atomic_fetch_add(&early_used, room, __ATOMIC_RELAXED);
    if (at + room > sizeof early)
        return ENOMEM;
    *found = (void *)up((uintptr_t)early + at + sizeof(size_t), alignment);
    *early_size(*found) = size;
    return 0;
}

__attribute__((constructor)) static void begin(void) {
    find_next();
    pthread_atfork(before_fork, after_fork, after_fork);
}

/* Whether this library is asked first for what it serves. */
int rota_reservoir_answers(void) { return dlsym(RTLD_DEFAULT, "posix_memalign") == (void *)posix_memalign; }

/* ---- in the place of the allocator's ---- */

int posix_memalign(void **found, size_t alignment, size_t size) {
    bool usual = alignment >= sizeof(void *) && (alignment & (alignment - 1)) == 0 && alignment <= PAGE;
    if (limit_bytes > 0 && size >= SMALL && usual) {
        pthread_mutex_lock(&lock);
        bool served = limit_bytes > 0 && take(size, found);
        pthread_mutex_unlock(&lock);
        if (served)
            return 0;
    }
    return find_next() ? next.memalign(found, alignment, size) : take_early(found, alignment, size);
}

void free(void *memory) {
    struct zone *zone = memory ? zone_of(memory) : NULL;
    if (!zone) {
        /* Whose it is is not known while this thread looks: it stays, which costs some bytes once. */
        if (memory && !is_early(memory) && find_next())
            next.free(memory);
        return;
    }
    int before = errno;
    pthread_mutex_lock(&lock);
    give(zone, memory);
    pthread_mutex_unlock(&lock);
    errno = before;
}

size_t malloc_usable_size(void *memory) {
    struct zone *zone = memory ? zone_of(memory) : NULL;
    if (!zone) {
        if (is_early(memory))
            return *early_size(memory);
        return find_next() ? next.usable_size(memory) : 0;
    }
    pthread_mutex_lock(&lock);
    size_t size = size_at(zone, memory);
    pthread_mutex_unlock(&lock);
    return size;
}

void *realloc(void *memory, size_t size) {
    if (!memory || (!zone_of(memory) && !is_early(memory))) {
        if (find_next())
            return next.realloc(memory, size);
        if (!memory)
            return malloc(size);
        errno = ENOMEM;
        return NULL;
    }
    if (size == 0) {
        free(memory);
        return NULL;
    }
    void *moved = malloc(size);
    if (moved) {
        memcpy(moved, memory, least(size, malloc_usable_size(memory)));
        free(memory);
    }
    return moved;
}

void *reallocarray(void *memory, size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(memory, bytes);
}
