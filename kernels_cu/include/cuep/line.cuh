// Rows as lines of 128 bytes: 120 of the row, and the operation's epoch, which the last lane has beside its 8. It lies
// where a word {epoch, value} has it, so that new memory holds an epoch that no operation has. The eight lanes of a
// line store it in one instruction, and load it in one. Whoever polls a line has its data with its flag: no fence at
// the sender, no second load at the receiver, and rows are received while they come in. Cost: 128 bytes for 120.
//
// What this stands on is the hardware, not PTX's memory model, which knows no access of a warp: a GPU stores 128
// aligned bytes of one instruction of a warp as one, also over NVLink, and loads them as one. NCCL's protocol LL128
// stands on the same, and NCCL takes it where all GPUs are linked by NVLink. (Where they are not, the group is
// refused.) On the CPU the lane with the epoch stores last and loads first.
//
// What travels beside a row are packets: 12 bytes and the epoch, stored and loaded in one access of 16 bytes, which is
// atomic by the memory model, too.
// Made of the kernel's constants: include it behind them.
#pragma once
#include <cuep/ll.cuh>

namespace cuep {

// Pieces of a slot: lines, then packets.
CUEP_DEVICE constexpr int slot_pieces(int num_packets) {
    return kNumPieces + (num_packets + kLineLanes - 1) / kLineLanes * kLineLanes;
}

// This thread's pieces of a row, to a slot in a peer's memory. By whole warps.
CUEP_DEVICE void store_lines(uint4* slot, const uint4 (&row)[kPiecesPerThread], uint32_t epoch) {
#pragma unroll
    for (int j = 0; j < kPiecesPerThread; j++) {
        const int piece = piece_at(j);
        uint4 v = row[j];
        if (is_half(piece)) (is_upper_half(piece) ? v.y : v.w) = epoch;
        __syncwarp();  // the lanes of a line store it together
        st_line(slot + piece, v, piece < kNumPieces, is_upper_half(piece));
    }
}

// What a thread still waits for.
struct Missing {
    int peer;
    uint32_t seen;  // another epoch
    bool is_any;
};

// A packet that this thread has asked for.
CUEP_DEVICE void note_packet(const Operation& op, uint4 packet, int peer, Missing& missing) {
    if (packet.w != static_cast<uint32_t>(op.epoch)) missing = {peer, packet.w, true};
}

// Where a lane without a piece joins the others: in the slot's first line. So no load hangs on a condition, and those
// of a thread are under way side by side.
CUEP_DEVICE int piece_to_ask(int piece) {
    return piece < kNumPieces ? piece : lane_idx() % kLineLanes;
}

// A piece of a line of a slot. By whole warps.
CUEP_DEVICE uint4 load_line(const uint4* slot, int piece) {
    return ld_line(slot + piece, is_upper_half(piece));
}

// What this thread has asked for: the lane that has a line's flag speaks for all eight.
CUEP_DEVICE void note_line(const Operation& op, uint4 v, int piece, int peer, Missing& missing) {
    const uint32_t flag = is_upper_half(piece) ? v.y : v.w;
    if (is_half(piece) && flag != static_cast<uint32_t>(op.epoch)) missing = {peer, flag, true};
}

// Asks for all that the threads of a warp need, at once, until all of it is there. ask(missing): loads and notes. By
// whole warps. False: gave up.
template <class Ask>
CUEP_DEVICE bool wait_lines(const Operation& op, Ask ask) {
    uint64_t since_ns = 0;
    int last = -1;  // the peer that this thread waits for
    bool is_ok = true;
    for (uint32_t spin = 1;; spin++) {
        Missing missing{0, 0, false};
        __syncwarp();  // the lanes of a line load it together
        ask(missing);
        if (missing.is_any) {
            last = missing.peer;
        } else if (kHasStats && last >= 0) {
            note_wait(op, last);
            last = -1;
        }
        if (!__any_sync(0xffffffffu, missing.is_any)) break;
        if (spin % kSpinsPerClock == 0) {
            const bool is_over =
                missing.is_any &&
                give_up(op, Phase::kRows, missing.peer, static_cast<uint32_t>(op.epoch), missing.seen, since_ns);
            is_ok = !__any_sync(0xffffffffu, is_over);
            if (!is_ok) break;
        }
        relax_warp();
    }
    end_polling();
    return is_ok;
}

}  // namespace cuep
