// Experts within a limit of memory: those that have not been used for longest go back to the system, which reads them
// again from the file that they are mapped from, when they are used. Those that a step computes with stay.
#pragma once

#include <initializer_list>
#include <mutex>
#include <vector>

#include "../cpu/platform.h"
#include "../step/call.h"

namespace edgellm {

// Experts first .. end, which lie side by side: body(their panels, bytes) for each of their three matrices.
template <typename Body>
void each_matrix(const Layer& layer, int first, int end, const Body& body) {
    for (const Linear* all : {&layer.gate, &layer.up, &layer.down}) {
        const Linear one = expert_of(*all, layer.router.experts, first);
        body(one.panels, size_t(end - first) * one.count() * one.panel_bytes());
    }
}

inline int64_t expert_bytes(const Layer& layer) {
    int64_t bytes = 0;
    each_matrix(layer, 0, 1, [&](const uint8_t*, size_t size) { bytes += size; });
    return bytes;
}

// Give back an expert unless it is among those in memory, and its neighbours that are not: the system maps some
// megabytes around what it reads.
inline void give_back(const Transformer& model, const ExpertMemory& memory, size_t number, int expert) {
    const Layer& layer = model.layers[number];
    const int64_t* const used = memory.used + number * memory.stride;
    int first = expert, end = expert + 1;
    while (first > 0 && used[first - 1] == 0) --first;
    while (end < layer.router.experts && used[end] == 0) ++end;
    const auto body = [](const uint8_t* panels, size_t bytes) { platform::give_back(panels, bytes); };
    if (used[expert] == 0) return each_matrix(layer, first, end, body);
    each_matrix(layer, first, expert, body);
    each_matrix(layer, expert + 1, end, body);
}

// Give back the expert that was used longest ago, and that no step computes with; false if there is none.
inline bool give_back_oldest(const Transformer& model, ExpertMemory& memory) {
    const int64_t* oldest = nullptr;
    const int64_t* const behind = memory.used + size_t(model.layer_count) * memory.stride;
    for (const int64_t* each = memory.used; each < behind; ++each)
        if (*each > 0 && memory.holders[each - memory.used] == 0 && (!oldest || *each < *oldest)) oldest = each;
    if (!oldest) return false;
    const size_t at = oldest - memory.used, layer = at / memory.stride;
    memory.used[at] = 0;
    memory.resident -= expert_bytes(model.layers[layer]);
    give_back(model, memory, layer, static_cast<int>(at % memory.stride));
    return true;
}

inline void keep_limit(const Transformer& model, ExpertMemory& memory) {
    while (memory.resident > memory.limit && give_back_oldest(model, memory)) {
    }
}

// Experts of the layer that a step computes, and those of them that it found not in memory.
struct HeldExperts {
    int layer = 0;
    std::vector<int32_t> all, fresh;
};

// Steps of several threads take turns.
inline std::mutex& turn_of_experts() {
    static std::mutex turn;
    return turn;
}

// Note that a step has done with the experts of a layer, in its turn.
inline void let_go(const Transformer& model, HeldExperts& held) {
    ExpertMemory& memory = *model.expert_memory;
    for (const int32_t expert : held.all) --memory.holders[size_t(held.layer) * memory.stride + expert];
    for (const int32_t expert : held.fresh) give_back(model, memory, held.layer, expert);
    held.all.clear();
    held.fresh.clear();
}

// Note that a step uses these experts of a layer now, and no longer those of the layer before it; give others back as
// far as the limit asks for it.
inline void use_experts(const Transformer& model, int layer, const int32_t* experts, int count, HeldExperts& held) {
    const std::lock_guard<std::mutex> turn(turn_of_experts());
    ExpertMemory& memory = *model.expert_memory;
    const int64_t bytes = expert_bytes(model.layers[layer]);
    ++memory.clock;
    let_go(model, held);
    held.layer = layer;
    held.all.assign(experts, experts + count);
    for (int i = 0; i < count; ++i) {
        const size_t at = size_t(layer) * memory.stride + experts[i];
        int64_t& used = memory.used[at];
        const bool there = used > 0;
        ++memory.holders[at];
        (there ? memory.hits : memory.reads) += 1;
        memory.bytes_read += there ? 0 : bytes;
        memory.resident += there ? 0 : bytes;
        if (!there) held.fresh.push_back(experts[i]);
        used = memory.clock;
    }
    keep_limit(model, memory);
}

// Note that a step has ended.
inline void leave_experts(const Transformer& model, HeldExperts& held) {
    const std::lock_guard<std::mutex> turn(turn_of_experts());
    let_go(model, held);
    keep_limit(model, *model.expert_memory);
}

}  // namespace edgellm
