// What the low-latency kernels share: where the words and slots of a bank lie, the phases of an operation, and what the
// ranks tell each other first. Made of the kernel's constants: include it behind them.
//
// An operation has two phases, which one kernel runs or two: a send phase takes the epoch, a receive phase ends it.
// They may lie far apart, with other operations between them, so everything that a bank needs is kept per bank.
#pragma once
#include <cuep/arrivals.cuh>
#include <cuep/base.cuh>
#include <cuep/sync.cuh>
#include <cuep/mask.cuh>
#include <cuep/operation.cuh>

namespace cuep {

constexpr int kNumLocalExperts = kNumExperts / kNumRanks;
constexpr int kNumPeers = kNumRanks - 1;
constexpr int kRowVecs = kRowBytes / 16;
static_assert(kNumThreads >= kNumRanks && kNumThreads >= kNumTopk, "one thread for each rank, and for each k");

// A row in pieces, and which of them a thread handles; a piece is held in a uint4. It has 16 bytes or, where rows
// travel as lines (line.cuh), what a lane has of a line: 16 bytes, or, each eighth lane, 8, in the half of the uint4
// where they lie in the row, and the epoch in the other. Two lines carry 15 times 16 bytes of the row: 7 and 7, and a
// half of the last each. The kParts blocks of a team share a row: with few tokens there are more blocks than rows.
static_assert(kIsLine || kParts == 1, "a flag says that the whole row is there, so one block stores it");
static_assert(!kIsLine || kNumThreads % kWarpSize == 0, "the lanes of a line are in one warp");
constexpr int kLineLanes = 8, kVecsOfTwoLines = 15;
constexpr int kVecsLeft = kRowVecs % kVecsOfTwoLines;
constexpr int kNumLines = kRowVecs / kVecsOfTwoLines * 2 + (kVecsLeft > 7 ? 2 : kVecsLeft > 0 ? 1 : 0);
constexpr int kNumPieces = kIsLine ? kNumLines * kLineLanes : kRowVecs;
constexpr int kPiecesPerPart = kIsLine ? (kNumLines + kParts - 1) / kParts * kLineLanes : kRowVecs;
constexpr int kPiecesPerThread = (kPiecesPerPart + kNumThreads - 1) / kNumThreads;

CUEP_DEVICE int part() {
    return static_cast<int>(blockIdx.x) % kParts;
}

// The j-th piece of this thread; kNumPieces or more: there is none.
CUEP_DEVICE int piece_at(int j) {
    const int in_part = threadIdx.x + j * kNumThreads;
    if constexpr (kParts == 1) return in_part;
    return in_part < kPiecesPerPart ? part() * kPiecesPerPart + in_part : kNumPieces;
}

// Whether a piece has 8 bytes of the row, beside which the line's epoch travels.
CUEP_DEVICE bool is_half(int piece) {
    return kIsLine && piece % kLineLanes == kLineLanes - 1;
}

// The 16 bytes of a row that a piece is, or of which it has a half; kRowVecs or more: the piece is beyond the row.
CUEP_DEVICE int vec_of(int piece) {
    if constexpr (!kIsLine) return piece;
    const int place = piece % (2 * kLineLanes),
              in_pair = is_half(piece) ? kVecsOfTwoLines - 1 : place - place / kLineLanes;
    return piece / (2 * kLineLanes) * kVecsOfTwoLines + in_pair;
}

// Of the two halves, the upper one.
CUEP_DEVICE bool is_upper_half(int piece) {
    return kIsLine && piece % (2 * kLineLanes) == 2 * kLineLanes - 1;
}

CUEP_DEVICE uint2 half_of(int piece, uint4 v) {
    return is_upper_half(piece) ? make_uint2(v.z, v.w) : make_uint2(v.x, v.y);
}

// Where in a row those 16 bytes are loaded. Those of a line may lie beyond the row: then they are of its end, as a
// branch would keep a thread's loads from being under way side by side.
CUEP_DEVICE int vec_to_load(int piece) {
    return kIsLine ? min(vec_of(piece), kRowVecs - 1) : piece;
}

// Of a row that nobody writes while this kernel runs.
CUEP_DEVICE uint4 load_piece(const uint4* row, int piece) {
    return load_streaming(row + vec_to_load(piece));
}

// To memory of this rank that a later kernel reads.
CUEP_DEVICE void store_piece(uint4* row, int piece, uint4 v) {
    if constexpr (!kIsLine) return store_16(row + piece, v);
    const int vec = vec_of(piece);
    if (vec >= kRowVecs) return;
    if (!is_half(piece)) return store_16(row + vec, v);
    store_8(reinterpret_cast<uint2*>(row + vec) + is_upper_half(piece), half_of(piece, v));
}

// Teams take rows in turn. Blocks that are over have none.
CUEP_DEVICE int num_teams() {
    return static_cast<int>(gridDim.x) / kParts;
}
CUEP_DEVICE int team() {
    const int number = static_cast<int>(blockIdx.x) / kParts;
    return number < num_teams() ? number : 1 << 30;
}

// The operation of this kernel: a new one if it sends, else the one that the handle's send began.
template <class Params>
CUEP_DEVICE Operation begin_phase(const Params& p, Op op) {
    Operation operation = p.is_send ? begin_operation(p, op) : resume_operation(p, op);
    load_mask(p, operation);
    begin_arrivals(p, operation);
    return operation;
}

// The block with the fewest tokens: what one block does for all.
CUEP_DEVICE bool is_clerk() {
    return blockIdx.x == gridDim.x - 1;
}

// Teams receive in another order than they send, so that with few tokens some send while others wait.
CUEP_DEVICE int first_to_receive() {
    return team() < num_teams() ? (team() + num_teams() / 2) % num_teams() : team();
}

// First of all: launches before this one are over, and the host may let go of what they read.
template <class Params>
CUEP_DEVICE void begin_launch(const Params& p) {
    wait_for_earlier_kernels();
    if (p.is_alone) let_next_kernel_begin();
    if (is_clerk() && threadIdx.x == 0) st_relaxed_sys(&p.report->ticket, p.ticket - 1);
    if (is_clerk()) add_up_arrivals(p);
}

template <class Params>
CUEP_DEVICE int bank_of(const Params& p, const Operation& op) {
    return static_cast<int>(op.epoch) & (p.num_banks - 1);
}

// Place of a slot, or of a token, in [num_banks, kNumRanks, max_tokens].
template <class Params>
CUEP_DEVICE int64_t slot_at(const Params& p, int bank, int src, int64_t slot) {
    return (static_cast<int64_t>(bank) * kNumRanks + src) * p.max_tokens + slot;
}

template <class Params>
CUEP_DEVICE uint64_t* flag_of(const Params& p, int dst, int bank, int src, int64_t slot) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.flags_offset) + slot_at(p, bank, src, slot);
}

template <class Params>
CUEP_DEVICE uint64_t* total_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.totals_offset) + bank * kNumRanks + src;
}

template <class Params>
CUEP_DEVICE uint64_t* done_of(const Params& p, int dst, int bank, int reader) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.done_offset) + bank * kNumRanks + reader;
}

// Row of a slot in dst's arena, [num_banks, kNumPeers, max_tokens]: a rank has no slots for its own rows.
template <int kSlotBytes = kRowBytes, class Params>
CUEP_DEVICE uint4* staged_row(const Params& p, int dst, int bank, int src, int64_t slot) {
    const int peer = (src - dst - 1 + kNumRanks) % kNumRanks;
    const int64_t at = (static_cast<int64_t>(bank) * kNumPeers + peer) * p.max_tokens + slot;
    return reinterpret_cast<uint4*>(p.arena[dst] + p.rows_offset + at * kSlotBytes);
}

template <class Params>
CUEP_DEVICE uint64_t* ready_of(const Params& p, int dst, int bank, int src) {
    return reinterpret_cast<uint64_t*>(p.arena[dst] + p.ready_offset) + bank * kNumRanks + src;
}

// What a kernel that sends finds in its bank, for all threads alike.
enum class Bank { kFree, kTaken, kStop };

// What this rank knows of its bank before it asks anybody; loaded with the epoch.
struct Standing {
    bool is_settled;  // this rank has received all that it sent
    bool is_free;     // so have the others, as far as what was last in this bank
};

template <class Params>
CUEP_DEVICE Standing standing_of(const Params& p, const Operation& op) {
    const auto& control = p.control->ops[static_cast<int>(op.op)];
    return {control.received + 1 == op.epoch, control.read_until + p.num_banks >= op.epoch};
}

// Whether the group is over or goes on without this rank, for block_any. Ask early and use the answer late.
template <class Params>
CUEP_DEVICE bool is_over(const Params& p, const Operation& op) {
    return is_broken(op) | is_excluded(p, op);
}

// Tells the peers that this rank has read what was last in the bank (pairs with wait_bank_free). A kernel that sends
// and receives leaves that to the next one that sends into the same bank, which is ordered behind it: then it costs
// nothing. One block; before it waits for the same word of a peer.
template <class Params>
CUEP_DEVICE void publish_last_read(const Params& p, const Operation& op, int bank) {
    const int tid = threadIdx.x;
    if (tid >= kNumRanks || tid == p.rank || !is_active(op, tid)) return;
    st_relaxed_sys(done_of(p, tid, bank, p.rank), (op.epoch - p.num_banks) << 32);
}

// Asks all ranks, this one too, where their totals have not told it all.
template <bool kMayBeTaken, class Params>
CUEP_DEVICE Bank ask_for_bank(const Params& p, const Operation& op, int bank, bool is_settled, bool is_off) {
    const int tid = threadIdx.x;
    const uint64_t own = ld_relaxed_sys(done_of(p, p.rank, bank, p.rank));
    const bool is_own_free = is_settled || is_in_window(op, own, p.num_banks);
    if (is_own_free && is_clerk()) publish_last_read(p, op, bank);
    if (!is_own_free && kMayBeTaken) return block_any(is_off) ? Bank::kStop : Bank::kTaken;
    bool is_ok = true;
    if (tid < kNumRanks && is_active(op, tid) && !(tid == p.rank && is_own_free)) {
        is_ok = wait_bank_free(op, done_of(p, p.rank, bank, tid), p.num_banks, tid);
    }
    return block_any(!is_ok || is_off) ? Bank::kStop : Bank::kFree;
}

// Before a send: waits until every peer has read what was last in the bank. kTaken: this rank itself has yet to receive
// it, and so have all ranks, as they do the same operations in the same order; only the device knows which of them a
// refusal made none. (Of dispatches the host knows it; should replays of graphs deceive it, the words are waited for,
// in vain.) kStop: the group is over. A barrier of the block, behind which all its threads have read the control words.
template <bool kMayBeTaken, class Params>
CUEP_DEVICE Bank wait_bank(const Params& p, const Operation& op, int bank, const Standing& standing, bool is_off) {
    if (!p.is_send || standing.is_free) {
        if (p.is_send && is_clerk()) publish_last_read(p, op, bank);
        return block_any(is_off) ? Bank::kStop : Bank::kFree;
    }
    return ask_for_bank<kMayBeTaken>(p, op, bank, standing.is_settled, is_off);
}

// In a total: which of the group's routings the operation is on, modulo 32, so that ranks which work on different
// handles find out. Below it is what the operation says, and bits 29 and 30.
constexpr int kRoutingShift = 24;
constexpr uint32_t kRoutingBits = 31u << kRoutingShift;

template <class Params>
CUEP_DEVICE uint32_t routing_bits(const Params& p) {
    return p.routing << kRoutingShift;
}

// In a total: this rank has received all that it sent before this operation, so what lies in the banks of earlier ones
// may be written over once this one is received. (kRefused says nothing: then the done words are asked.)
constexpr uint32_t kSettled = 1u << 31;

CUEP_DEVICE uint32_t settled_bit(const Standing& standing) {
    return standing.is_settled ? kSettled : 0;
}

// Of thread 0: whether this block is the last of a kernel that sends to have read the control words, so that it is
// to write them. Behind a barrier after that, and asked early: the answer is there when the block ends.
CUEP_DEVICE bool is_last_to_begin(const Operation& op) {
    if (threadIdx.x != 0) return false;
    const uint32_t before = atom_add_relaxed_gpu(&op.control->ops[static_cast<int>(op.op)].blocks, 1u);
    return before % gridDim.x == gridDim.x - 1;
}

// What every rank says of its part; in shared memory.
struct Totals {
    uint32_t of[kNumRanks];  // how much it sends, or kRefused, or kMispaired
    bool are_settled[kNumRanks];
};

constexpr uint32_t kMispaired = kRefused - 1;  // in place of a total: a rank works on another routing

// False: gave up, or is_ok was false for a thread, which may have waited for other words.
template <class Params>
CUEP_DEVICE bool wait_totals(const Params& p, const Operation& op, int bank, bool is_ok, Totals& totals) {
    const int tid = threadIdx.x;
    if (tid < kNumRanks) {
        uint32_t total = routing_bits(p) | kSettled;  // of a rank that takes no part
        if (is_active(op, tid)) is_ok &= wait_word<kHasStats>(op, total_of(p, p.rank, bank, tid), tid, total);
        const bool is_paired = (total & kRoutingBits) == routing_bits(p);
        totals.of[tid] = total == kRefused ? total : is_paired ? total & ~(kSettled | kRoutingBits) : kMispaired;
        totals.are_settled[tid] = total != kRefused && (total & kSettled) != 0;
    }
    return !block_any(!is_ok);
}

// The rank that refused its part, this one if it did, or -1.
template <class Params>
CUEP_DEVICE int refusing_rank(const Params& p, const Totals& totals) {
    if (p.is_refused) return p.rank;
    for (int r = 0; r < kNumRanks; r++) {
        if (totals.of[r] == kRefused) return r;
    }
    return -1;
}

// Whether a rank works on another routing: after calls that were refused between the phases of a pending operation,
// ranks may be one operation apart.
CUEP_DEVICE bool is_mispaired(const Totals& totals) {
    bool is_any = false;
    for (int r = 0; r < kNumRanks; r++) is_any |= totals.of[r] == kMispaired;
    return is_any;
}

// One thread, when an operation or its send phase is over but for other blocks, which look at none of this any more.
template <class Params>
CUEP_DEVICE void end_phase(const Params& p, const Operation& op, int bank, const Totals& totals) {
    take_epoch(op);
    end_arrivals(p);
    if (!p.is_receive) {
        p.state->epoch[static_cast<int>(op.op)] = op.epoch;
        return;
    }
    auto& control = p.control->ops[static_cast<int>(op.op)];
    control.received++;
    bool are_settled = true;
    for (int r = 0; r < kNumRanks; r++) are_settled &= totals.are_settled[r];
    if (are_settled && control.read_until + 1 < op.epoch) control.read_until = op.epoch - 1;
    *done_of(p, p.rank, bank, p.rank) = tagged(op, 0);
}

// How a launch ends. note(): what else one thread is to write for the kernels that come behind. is_last_begun: of
// is_last_to_begin.
template <class Params, class Note>
CUEP_DEVICE void end_launch(
    const Params& p, const Operation& op, int bank, bool is_last_begun, const Totals& totals, Note note) {
    bool is_writer = is_last_begun;
    if (!p.is_send) {  // the peers may be waiting for this alone: tell them now, when all blocks have read
        if (!is_last_block(op)) return;
        const int tid = threadIdx.x;
        if (tid < kNumRanks && tid != p.rank && is_active(op, tid)) {
            st_release_sys(done_of(p, tid, bank, p.rank), tagged(op, 0));  // pairs with wait_bank_free
        }
        is_writer = tid == 0;
    }
    if (!is_writer) return;
    note();
    end_phase(p, op, bank, totals);
}

}  // namespace cuep
