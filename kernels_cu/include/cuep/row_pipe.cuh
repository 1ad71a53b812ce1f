// Rows that a warp moves through shared memory with the bulk-copy engine, some rows ahead: each is loaded once and
// stored as often as is wanted.
#pragma once
#include <cuep/base.cuh>
#include <cuep/bulk.cuh>

namespace cuep {

// A row in pieces of at most kMostBytes, of which each is a multiple of 16 bytes and all but the last are alike; of a
// multiple of 512, the same number of 16 bytes for each lane, where that can be.
template <int kRowBytes, int kMostBytes>
struct Pieces {
    static_assert(kMostBytes % 16 == 0, "else a piece could begin beyond the row");
    static constexpr int kFewest = (kRowBytes + kMostBytes - 1) / kMostBytes;
    static constexpr int kUnit = kFewest > 1 && kMostBytes % 512 == 0 ? 512 : 16;
    static constexpr int kBytes = (kRowBytes + kFewest * kUnit - 1) / (kFewest * kUnit) * kUnit;
    static constexpr int kCount = (kRowBytes + kBytes - 1) / kBytes;

    static CUEP_DEVICE uint32_t bytes(int piece) {
        return static_cast<uint32_t>(min(kBytes, kRowBytes - piece * kBytes));
    }
};

// In the place of what tells others about a row, where nobody is told.
struct Untold {};
template <class Release>
constexpr bool kTells = true;
template <>
constexpr bool kTells<Untold> = false;

// kRoom: of shared memory for a row, where it becomes more than was loaded.
template <int kRowBytes, int kNumStages, int kRoom = kRowBytes>
struct RowPipe {
    static_assert(kNumStages >= 2 && kNumStages <= 32, "a row is loaded while the one before it is stored");
    static constexpr int kStageBytes = (kRoom + 127) / 128 * 128;
    static constexpr int kSmemBytes = kNumStages * (kStageBytes + 8);  // of one warp

    uint8_t* stages;
    uint64_t* loaded;
    uint32_t parity;  // bit s: of the next load into stage s

    // The part of this warp, the warp-th of num_warps that have one, in the block's shared memory. The whole warp
    // calls.
    CUEP_DEVICE RowPipe(uint8_t* smem, int warp, int num_warps)
        : stages(smem + warp * kNumStages * kStageBytes),
          loaded(reinterpret_cast<uint64_t*>(smem + num_warps * kNumStages * kStageBytes) + warp * kNumStages),
          parity(0) {
        for (int stage = 0; stage < kNumStages; stage++) mbarrier_init(loaded + stage);
    }

    CUEP_DEVICE uint8_t* stage_at(int stage) const { return stages + stage * kStageBytes; }

    template <int kBytes = kRowBytes>
    CUEP_DEVICE void load(int stage, const uint8_t* row) {
        load(stage, row, kBytes);
    }

    CUEP_DEVICE void load(int stage, const uint8_t* row, uint32_t bytes) {
        bulk_load(stage_at(stage), row, bytes, loaded + stage);
    }

    CUEP_DEVICE void wait(int stage) {
        mbarrier_wait(loaded + stage, parity >> stage & 1u);
        parity ^= 1u << stage;
    }

    // Of many stages half are loaded ahead and half are being stored; of two or three, one is being stored.
    static constexpr int kNumStoring = kNumStages < 4 ? 1 : kNumStages / 2;
    static constexpr int kNumAhead = kNumStages - kNumStoring;

    static CUEP_DEVICE int after(int stage) { return stage + 1 == kNumStages ? 0 : stage + 1; }
    static CUEP_DEVICE int before(int stage) { return stage == 0 ? kNumStages - 1 : stage - 1; }

    // Moves the rows of a walk (is_over(), ask(), advance()), kNumAhead of them loaded ahead. source(walk) is where one
    // lies; plan(walk) works out where it goes while it is on its way; store(walk, plan, row) starts its bulk stores;
    // and beside(walk, plan) has the time in which they run. When it returns all rows are where they go, not only read.
    // release(walk), if given, tells others about a row: it comes some rows later, when all that is done. The walk is
    // gone through once, so what is on its way is kept.
    template <int kBytes = kRowBytes,
              class Walk,
              class Source,
              class Plan,
              class Store,
              class Beside,
              class Release = Untold>
    CUEP_DEVICE void move(
        Walk next, Source source, Plan plan, Store store, Beside beside, Release release = Release()) {
        constexpr int kNumUntold = kTells<Release> ? kNumStages - 1 : 1;
        Walk on_way[kNumAhead], untold[kNumUntold];  // oldest first
        int num_untold = 0, refilled = kNumAhead;
#pragma unroll
        for (int stage = 0; stage < kNumAhead; stage++) {
            on_way[stage] = next;
            if (next.is_over()) continue;
            next.ask();
            load<kBytes>(stage, source(next));
            next.advance();
        }
        for (int stage = 0; !on_way[0].is_over(); stage = after(stage), refilled = after(refilled)) {
            const Walk now = on_way[0];
            next.ask();
            const auto where = plan(now);
            wait(stage);
            store(now, where, stage_at(stage));
            bulk_commit();
            beside(now, where);
            if constexpr (kTells<Release>) {
                if (num_untold == kNumUntold) {
                    bulk_wait<kNumUntold>();  // all the way, not only read: others are told that the row is there
                    release(untold[0]);
                    num_untold--;
#pragma unroll
                    for (int i = 0; i < kNumUntold - 1; i++) untold[i] = untold[i + 1];
                }
#pragma unroll
                for (int i = 0; i < kNumUntold; i++) {
                    if (i == num_untold) untold[i] = now;
                }
                num_untold++;
            }
#pragma unroll
            for (int i = 0; i < kNumAhead - 1; i++) on_way[i] = on_way[i + 1];
            on_way[kNumAhead - 1] = next;
            if (next.is_over()) continue;
            bulk_wait_read<kNumStoring>();  // the stage that is refilled was stored so many rows ago
            load<kBytes>(refilled, source(next));
            next.advance();
        }
        bulk_wait<0>();
        if constexpr (kTells<Release>) {
#pragma unroll
            for (int i = 0; i < kNumUntold; i++) {
                if (i < num_untold) release(untold[i]);
            }
        }
    }

    // Moves the rows, or pieces of rows, of a walk (is_over(), advance()) and releases what tells others about one
    // kNumStages - 1 of them later, when it is there. source(walk) is where it lies, of bytes(walk); store(walk, row)
    // starts its bulk stores and may store more that the release covers; release(walk) comes when all that is done.
    template <class Walk, class Source, class Bytes, class Store, class Release>
    CUEP_DEVICE void move_and_tell(const Walk& walk, Source source, Bytes bytes, Store store, Release release) {
        constexpr int kLate = kNumStages - 1;
        Walk next = walk, stored = walk, told = walk;
        auto load_next = [&](int stage) {
            load(stage, source(next), bytes(next));
            next.advance();
        };
        for (int stage = 0; stage < kNumAhead && !next.is_over(); stage++) load_next(stage);
        int stage = 0, num_pending = 0, refilled = kNumAhead;
        for (; !stored.is_over(); stored.advance()) {
            wait(stage);
            store(stored, stage_at(stage));
            bulk_commit();
            if (++num_pending > kLate) {
                bulk_wait<kLate>();  // all the way, not only read: others are told that the row is there
                release(told);
                told.advance();
                num_pending--;
            }
            if (!next.is_over()) {
                bulk_wait_read<kNumStoring>();  // the stage that is refilled was stored so many rows ago
                load_next(refilled);
            }
            stage = after(stage);
            refilled = after(refilled);
        }
        bulk_wait<0>();
        for (; num_pending > 0; num_pending--, told.advance()) release(told);
    }

    // Moves rows that others bring: each is loaded while the next one is waited for. receive(walk, item) waits, false:
    // gave up, and sets item.row, which stays null where nothing is to be moved; store(item, row) starts its bulk
    // stores. When it returns, with what receive() said last, all rows are where they go.
    template <int kBytes, class Item, class Walk, class Receive, class Store>
    CUEP_DEVICE bool move_as_they_come(Walk walk, Receive receive, Store store) {
        Item loaded{};  // into the stage before this one
        int stage = 0;
        auto store_loaded = [&] {
            if (loaded.row == nullptr) return;
            wait(before(stage));
            store(loaded, stage_at(before(stage)));
            bulk_commit();
        };
        bool is_ok = true;
        for (; !walk.is_over(); walk.advance()) {
            Item next{};
            is_ok = receive(walk, next);
            if (!is_ok) break;
            if (next.row != nullptr) {
                fence_proxy_async();               // what others stored comes before the bulk copy that reads it
                bulk_wait_read<kNumStages - 2>();  // the stage that is refilled was stored so many rows ago
                load<kBytes>(stage, next.row);
            }
            store_loaded();
            loaded = next;
            if (loaded.row != nullptr) stage = after(stage);
        }
        store_loaded();
        bulk_wait<0>();
        fence_proxy_async();
        return is_ok;
    }
};

}  // namespace cuep
