// Rows as packets: 12 bytes of the row and the operation's epoch, stored and loaded in one access of 16 bytes. Whoever
// polls a packet has its data with its flag: no fence at the sender, no second load at the receiver, for a third more
// bytes. So it pays where latency counts and bytes do not: few tokens.
//
// Three pieces of 16 bytes, kGroups apart in the row, travel as four packets, kGroups apart in the slot: a warp stores
// and loads whole lines. Made of the kernel's constants: include it behind them.
#pragma once
#include <cuep/ll.cuh>

namespace cuep {

constexpr int kRowPackets = 4 * kGroups;

// One group of a row as packets, or to be taken for such.
struct PacketGroup {
    uint4 packet[4];
};

CUEP_DEVICE PacketGroup pack_group(uint4 a, uint4 b, uint4 c, uint32_t epoch) {
    return {{{a.x, a.y, a.z, epoch}, {a.w, b.x, b.y, epoch}, {b.z, b.w, c.x, epoch}, {c.y, c.z, c.w, epoch}}};
}

CUEP_DEVICE void unpack_group(const PacketGroup& group, uint4& a, uint4& b, uint4& c) {
    const auto& p = group.packet;
    a = {p[0].x, p[0].y, p[0].z, p[1].x};
    b = {p[1].y, p[1].z, p[2].x, p[2].y};
    c = {p[2].z, p[3].x, p[3].y, p[3].z};
}

// This thread's pieces of a row, to a slot in dst's memory.
CUEP_DEVICE void store_packets(uint4* slot, const uint4 (&row)[kVecsPerThread], uint32_t epoch) {
#pragma unroll
    for (int g = 0; g < kGroupsPerThread; g++) {
        if (group_at(g) >= kGroups) continue;
        const PacketGroup group = pack_group(row[3 * g], row[3 * g + 1], row[3 * g + 2], epoch);
#pragma unroll
        for (int i = 0; i < 4; i++) st_packet(slot + group_at(g) + i * kGroups, group.packet[i]);
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

CUEP_DEVICE void ask_packet(const Operation& op, const uint4* from, int peer, uint4& packet, Missing& missing) {
    packet = ld_packet(from);
    note_missing(op, packet, peer, missing);
}

CUEP_DEVICE void ask_group(
    const Operation& op, const uint4* slot, int group, int peer, PacketGroup& asked, Missing& missing) {
#pragma unroll
    for (int i = 0; i < 4; i++) asked.packet[i] = ld_packet(slot + group + i * kGroups);
#pragma unroll
    for (int i = 0; i < 4; i++) note_missing(op, asked.packet[i], peer, missing);
}

// Asks for all that a thread needs, at once, until all of it is there. ask(missing): loads and notes. False: gave up.
template <class Ask>
CUEP_DEVICE bool wait_packets(const Operation& op, Ask ask) {
    uint64_t since_ns = 0;
    for (uint32_t spin = 1;; spin++) {
        Missing missing{0, 0, false};
        ask(missing);
        if (!missing.is_any) return true;
        if (spin % kSpinsPerClock == 0 &&
            give_up(op, Phase::kRows, missing.peer, static_cast<uint32_t>(op.epoch), missing.seen, since_ns)) {
            return false;
        }
        relax();
    }
}

}  // namespace cuep
