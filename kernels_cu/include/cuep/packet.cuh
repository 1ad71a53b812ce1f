// Rows as packets: 12 bytes of the row and the operation's epoch, stored and loaded in one access of 16 bytes. Whoever
// polls a packet has its data with its flag: no fence at the sender, no second load at the receiver, for a third more
// bytes. So it pays where latency counts and bytes do not: few tokens.
// Made of the kernel's constants: include it behind them.
#pragma once
#include <cuep/ll.cuh>

namespace cuep {

constexpr int kRowPackets = kNumPieces;

// This thread's pieces of a row, to a slot in a peer's memory.
CUEP_DEVICE void store_packets(uint4* slot, const uint4 (&row)[kPiecesPerThread], uint32_t epoch) {
#pragma unroll
    for (int j = 0; j < kPiecesPerThread; j++) {
        if (piece_at(j) < kNumPieces) st_packet(slot + piece_at(j), {row[j].x, row[j].y, row[j].z, epoch});
    }
}

// What a thread still waits for.
struct Missing {
    int peer;
    uint32_t seen;  // another epoch
    bool is_any;
};

CUEP_DEVICE void note_missing(const Operation& op, uint4 packet, int peer, Missing& missing) {
    if (packet.w != static_cast<uint32_t>(op.epoch)) missing = {peer, packet.w, true};
}

// Asks for all that a thread needs, at once, until all of it is there. ask(missing): loads and notes. False: gave up.
template <class Ask>
CUEP_DEVICE bool wait_packets(const Operation& op, Ask ask) {
    uint64_t since_ns = 0;
    int last = 0;  // of the peers that were waited for
    for (uint32_t spin = 1;; spin++) {
        Missing missing{0, 0, false};
        ask(missing);
        if (!missing.is_any) {
            if (kHasStats && spin > 1) note_wait(op, last);
            return true;
        }
        last = missing.peer;
        if (spin % kSpinsPerClock == 0 &&
            give_up(op, Phase::kRows, missing.peer, static_cast<uint32_t>(op.epoch), missing.seen, since_ns)) {
            return false;
        }
        relax();
    }
}

}  // namespace cuep
