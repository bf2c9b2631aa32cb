/* Ring between two processes: the native form of the protocol in protocol.py.
 *
 * Each atomic access is one STEP of the table there, with its memory order; tests/comm/ring/test_ring_model.py
 * reads this file and compares. Counters in shared memory have 32 bits and wrap; those of an end have 64.
 * A message's chunks lie in consecutive slots; one that fits the ring is contiguous, for which the slots
 * before the ring's end are passed over where needed (both ends compute the same from its size).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define STEP(name, access) access

#define API __attribute__((visibility("default")))

enum { HEAD = 64, CONSUMER_WAITS = 128, TAIL = 192, PRODUCER_WAITS = 256, HEADERS = 4096 };
enum { HEADER_BYTES = 128, DESCRIPTION_BYTES = 112 };

typedef _Atomic uint32_t word;

struct end {
    uint8_t *base;
    uint8_t *payload;
    uint64_t slot_bytes;
    uint64_t slots;
    uint64_t next;     /* Producer: chunks published. Consumer: chunks of whole messages taken. */
    uint64_t other;    /* The other end's counter as last seen. */
    uint64_t chunk;    /* Chunks done of the message under way. */
    uint64_t taken;    /* Consumer: next, and the chunks done. */
    uint64_t limit;    /* Consumer: no credit is given beyond, as somebody reads there in place. */
    uint64_t given;    /* Consumer: credits given. */
    uint64_t spin_ns;  /* How long to spin before sleep: adapts between the two limits. */
    uint64_t spin_least_ns;
    uint64_t spin_most_ns;
    uint64_t sleeps;   /* Counted: waits that had to sleep. */
    uint64_t stream_bytes; /* A message of this size does not stay in the caches: its stores go past them. */
    _Atomic uint32_t guard; /* Between threads of the consumer: taken, limit, given. */
    uint32_t unused;
};

static word *at(const struct end *end, size_t offset) { return (word *)(end->base + offset); }

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Copy. `streams`: the target does not stay in the caches, so its lines are not read before they are written. Such
 * stores are not ordered by a release, hence the fence. */
static void copy(uint8_t *to, const uint8_t *from, uint64_t count, int streams) {
#if defined(__x86_64__)
    if (streams) {
        uint64_t head = -(uintptr_t)to & 63;
        if (head > count) head = count;
        memcpy(to, from, head);
        for (to += head, from += head, count -= head; count >= 64; to += 64, from += 64, count -= 64) {
            const __m128i *line = (const __m128i *)from;
            __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
            __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)to + 1, b);
            _mm_stream_si128((__m128i *)to + 2, c);
            _mm_stream_si128((__m128i *)to + 3, d);
        }
        memcpy(to, from, count);
        _mm_sfence();
        return;
    }
#else
    (void)streams;
#endif
    memcpy(to, from, count);
}

/* Not FUTEX_PRIVATE: two processes. A signal ends the sleep early, as does a changed word. */
static void futex_wait(word *address, uint32_t seen, uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    syscall(SYS_futex, address, FUTEX_WAIT, seen, &t, NULL, 0);
}

static void futex_wake(word *address) { syscall(SYS_futex, address, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

/* Widen a counter of shared memory; it is never behind `from` nor 2^31 chunks ahead of it. */
static uint64_t widen(uint64_t from, uint32_t low) { return from + (uint32_t)(low - (uint32_t)from); }

static uint64_t chunks_of(const struct end *end, uint64_t nbytes) {
    return nbytes ? (nbytes + end->slot_bytes - 1) / end->slot_bytes : 1;
}

static uint64_t passed_over(const struct end *end, uint64_t chunks) {
    uint64_t position = end->next % end->slots;
    return chunks > 1 && chunks <= end->slots && position + chunks > end->slots ? end->slots - position : 0;
}

static uint8_t *header_of(const struct end *end) {
    return end->base + HEADERS + (end->next % end->slots) * HEADER_BYTES;
}

/* Whether to look again at once, in a wait that began at `began`. */
static int spins(const struct end *end, uint64_t began, unsigned *turn) {
    relax();
    if (++*turn & 15) return 1;
    return now() - began < end->spin_ns;
}

/* After a wait, slept through or not: what came soon was worth a spin, next time too. */
static void adapt(struct end *end, uint64_t began) {
    if (!began || !end->spin_most_ns) return;
    uint64_t gone = now() - began;
    if (gone > end->spin_most_ns)
        end->spin_ns = end->spin_ns / 2 > end->spin_least_ns ? end->spin_ns / 2 : end->spin_least_ns;
    else if (2 * gone > end->spin_ns)
        end->spin_ns = 2 * gone < end->spin_most_ns ? 2 * gone : end->spin_most_ns;
}

/* Credit for the chunk whose counter is `wanted`: 1, or 0 after wait_ns. */
static int wait_credit(struct end *end, uint64_t wanted, uint64_t wait_ns) {
    uint64_t began = 0;
    unsigned turn = 0;
    int spinning = end->spin_most_ns > 0;
    if (wanted - end->other <= end->slots) return 1;
    for (;;) {
        uint32_t seen = STEP("producer.credit", atomic_load_explicit(at(end, TAIL), memory_order_acquire));
        end->other = widen(end->other, seen);
        if (wanted - end->other <= end->slots) {
            adapt(end, began);
            return 1;
        }
        if (!wait_ns) return 0;
        if (!began) began = now();
        if (spinning && (spinning = spins(end, began, &turn))) continue;
        uint64_t gone = now() - began;
        if (gone >= wait_ns) {
            adapt(end, began);
            return 0;
        }
        end->sleeps++;
        STEP("producer.flag", atomic_store_explicit(at(end, PRODUCER_WAITS), 1, memory_order_relaxed));
        STEP("producer.flag_fence", atomic_thread_fence(memory_order_seq_cst));
        futex_wake(at(end, PRODUCER_WAITS)); /* The consumer's drainer. */
        STEP("producer.sleep", futex_wait(at(end, TAIL), seen, wait_ns - gone));
        STEP("producer.unflag", atomic_store_explicit(at(end, PRODUCER_WAITS), 0, memory_order_relaxed));
    }
}

/* Publish a message's chunks as far as there is credit, waiting for each at most wait_ns: 1 when all are. */
API int mtc_send(struct end *end, const uint8_t *header, const uint8_t *source, uint64_t nbytes, uint64_t wait_ns) {
    uint64_t chunks = chunks_of(end, nbytes), over = passed_over(end, chunks);
    int streams = nbytes >= end->stream_bytes && end->slots * end->slot_bytes >= end->stream_bytes;
    while (end->chunk < chunks) {
        uint64_t counter = end->next + over + end->chunk, offset = end->chunk * end->slot_bytes;
        uint64_t count = nbytes - offset < end->slot_bytes ? nbytes - offset : end->slot_bytes;
        if (!wait_credit(end, counter + 1, wait_ns)) return 0;
        if (!end->chunk) STEP("producer.header", memcpy(header_of(end), header, HEADER_BYTES));
        if (count)
            STEP("producer.payload",
                 copy(end->payload + counter % end->slots * end->slot_bytes, source + offset, count, streams));
        STEP("producer.publish", atomic_store_explicit(at(end, HEAD), (uint32_t)(counter + 1), memory_order_release));
        STEP("producer.publish_fence", atomic_thread_fence(memory_order_seq_cst));
        if (STEP("producer.asleep", atomic_load_explicit(at(end, CONSUMER_WAITS), memory_order_relaxed)))
            STEP("producer.wake", futex_wake(at(end, HEAD)));
        end->chunk++;
    }
    end->next += over + chunks;
    end->chunk = 0;
    return 1;
}

/* Chunk whose counter is `wanted` published: 1, or 0 after wait_ns. */
static int wait_published(struct end *end, uint64_t wanted, uint64_t wait_ns) {
    uint64_t began = 0;
    unsigned turn = 0;
    int spinning = end->spin_most_ns > 0;
    if ((int64_t)(end->other - wanted) >= 0) return 1;
    for (;;) {
        uint32_t seen = STEP("consumer.message", atomic_load_explicit(at(end, HEAD), memory_order_acquire));
        end->other = widen(end->other, seen);
        if ((int64_t)(end->other - wanted) >= 0) {
            adapt(end, began);
            return 1;
        }
        if (!wait_ns) return 0;
        if (!began) began = now();
        if (spinning && (spinning = spins(end, began, &turn))) continue;
        uint64_t gone = now() - began;
        if (gone >= wait_ns) {
            adapt(end, began);
            return 0;
        }
        end->sleeps++;
        STEP("consumer.flag", atomic_store_explicit(at(end, CONSUMER_WAITS), 1, memory_order_relaxed));
        STEP("consumer.flag_fence", atomic_thread_fence(memory_order_seq_cst));
        STEP("consumer.sleep", futex_wait(at(end, HEAD), seen, wait_ns - gone));
        STEP("consumer.unflag", atomic_store_explicit(at(end, CONSUMER_WAITS), 0, memory_order_relaxed));
    }
}

/* The next message's header, which stays next until taken: 1, or 0 after wait_ns. */
API int mtc_peek(struct end *end, uint8_t *header, uint64_t wait_ns) {
    if (!wait_published(end, end->next + 1, wait_ns)) return 0;
    STEP("consumer.header", memcpy(header, header_of(end), HEADER_BYTES));
    return 1;
}

static void took(struct end *end, uint64_t counter);

/* Copy the next message, giving each chunk's credit at once; waits for a chunk at most wait_ns: 1 when all is
 * copied. */
API int mtc_take(struct end *end, uint8_t *target, uint64_t nbytes, uint64_t wait_ns) {
    uint64_t chunks = chunks_of(end, nbytes), over = passed_over(end, chunks);
    while (end->chunk < chunks) {
        uint64_t counter = end->next + over + end->chunk, offset = end->chunk * end->slot_bytes;
        uint64_t count = nbytes - offset < end->slot_bytes ? nbytes - offset : end->slot_bytes;
        if (!wait_published(end, counter + 1, wait_ns)) return 0;
        if (count)
            STEP("consumer.payload",
                 copy(target + offset, end->payload + counter % end->slots * end->slot_bytes, count,
                      nbytes >= end->stream_bytes));
        end->chunk++;
        took(end, counter + 1);
    }
    end->next += over + chunks;
    end->chunk = 0;
    return 1;
}

/* Under the guard: give the credits for what was taken, up to the limit. */
static void give(struct end *end) {
    uint64_t given = end->taken < end->limit ? end->taken : end->limit;
    if (given <= end->given) return;
    end->given = given;
    STEP("consumer.credit", atomic_store_explicit(at(end, TAIL), (uint32_t)given, memory_order_release));
    STEP("consumer.credit_fence", atomic_thread_fence(memory_order_seq_cst));
    if (STEP("consumer.asleep", atomic_load_explicit(at(end, PRODUCER_WAITS), memory_order_relaxed)))
        STEP("consumer.wake", futex_wake(at(end, TAIL)));
}

static void lock(struct end *end) {
    while (atomic_exchange_explicit(&end->guard, 1, memory_order_acquire)) relax();
}

static void unlock(struct end *end) { atomic_store_explicit(&end->guard, 0, memory_order_release); }

static void took(struct end *end, uint64_t counter) {
    lock(end);
    end->taken = counter;
    give(end);
    unlock(end);
}

/* Copy the next message if it is number `number`, of one chunk and of `description`: 1. 2 if another message is
 * next, whose header is written to `header`. 0 after wait_ns. */
API int mtc_receive(struct end *end, uint8_t *header, const uint8_t *description, uint64_t number, uint8_t *target,
                    uint64_t nbytes, uint64_t wait_ns) {
    uint64_t found;
    if (!mtc_peek(end, header, wait_ns)) return 0;
    memcpy(&found, header, sizeof found);
    if (found != number || nbytes > end->slot_bytes || end->chunk ||
        memcmp(header + HEADER_BYTES - DESCRIPTION_BYTES, description, DESCRIPTION_BYTES))
        return 2;
    return mtc_take(end, target, nbytes, 0);
}

/* Whether the next message, whose header was read and nothing more, is there as a whole and contiguous: 1, or
 * 0 after wait_ns. Its address is written to `address`. The slots passed over are given back now: the
 * message's last chunks may wait for that credit. */
API int mtc_arrived(struct end *end, uint64_t nbytes, uint8_t **address, uint64_t wait_ns) {
    uint64_t chunks = chunks_of(end, nbytes), over = passed_over(end, chunks);
    if (over && !end->chunk && end->taken < end->next + over) took(end, end->next + over);
    if (!wait_published(end, end->next + over + chunks, wait_ns)) return 0;
    *address = end->payload + (end->next + over) % end->slots * end->slot_bytes;
    return 1;
}

/* Go past the next message without giving its credit: no credit from its first chunk on until mtc_limit. */
API uint64_t mtc_hold(struct end *end, uint64_t nbytes) {
    uint64_t chunks = chunks_of(end, nbytes), first = end->next + passed_over(end, chunks);
    end->next = first + chunks;
    lock(end);
    if (first < end->limit) end->limit = first;
    end->taken = end->next;
    give(end);
    unlock(end);
    return first;
}

/* Give credits up to `limit` from now on. */
API void mtc_limit(struct end *end, uint64_t limit) {
    lock(end);
    end->limit = limit;
    give(end);
    unlock(end);
}

/* Whether the producer sleeps for want of credit: 1, or 0 after wait_ns. */
API int mtc_starved(struct end *end, uint64_t wait_ns) {
    if (atomic_load_explicit(at(end, PRODUCER_WAITS), memory_order_relaxed)) return 1;
    futex_wait(at(end, PRODUCER_WAITS), 0, wait_ns);
    return (int)atomic_load_explicit(at(end, PRODUCER_WAITS), memory_order_relaxed);
}

API uint32_t mtc_version(void) { return 5; }

API uint32_t mtc_end_bytes(void) { return sizeof(struct end); }
