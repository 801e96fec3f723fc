// Experts within a limit of memory: those that have not been used for longest go back to the system, which reads them
// again from the file that they are mapped from, when they are used.
#pragma once

#include <initializer_list>
#include <mutex>

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

// Give back the expert that was used longest ago, and before the layer that is computed now; false if there is none.
// Its neighbours that are not in memory go with it: the system maps pages around those that it reads.
inline bool give_back_oldest(const Transformer& model, ExpertMemory& memory) {
    const int64_t* oldest = nullptr;
    const int64_t* const behind = memory.used + size_t(model.layer_count) * memory.stride;
    for (const int64_t* each = memory.used; each < behind; ++each)
        if (*each > 0 && *each < memory.clock && (!oldest || *each < *oldest)) oldest = each;
    if (!oldest) return false;
    const size_t at = oldest - memory.used;
    const Layer& layer = model.layers[at / memory.stride];
    memory.used[at] = 0;
    const int64_t* const of_layer = memory.used + at / memory.stride * memory.stride;
    int first = static_cast<int>(at % memory.stride), end = first + 1;
    while (first > 0 && of_layer[first - 1] == 0) --first;
    while (end < layer.router.experts && of_layer[end] == 0) ++end;
    each_matrix(layer, first, end,
                [](const uint8_t* panels, size_t bytes) { platform::give_back(panels, bytes); });
    memory.resident -= expert_bytes(layer);
    return true;
}

// Note that these experts of a layer are used now, and give others back as far as the limit asks for it. Steps of
// several threads take turns.
inline void use_experts(const Transformer& model, int layer, const int32_t* experts, int count) {
    static std::mutex turn;
    const std::lock_guard<std::mutex> held(turn);
    ExpertMemory& memory = *model.expert_memory;
    const int64_t bytes = expert_bytes(model.layers[layer]);
    ++memory.clock;
    for (int i = 0; i < count; ++i) {
        int64_t& used = memory.used[size_t(layer) * memory.stride + experts[i]];
        const bool there = used > 0;
        (there ? memory.hits : memory.reads) += 1;
        memory.bytes_read += there ? 0 : bytes;
        memory.resident += there ? 0 : bytes;
        used = memory.clock;
    }
    while (memory.resident > memory.limit && give_back_oldest(model, memory)) {
    }
}

}  // namespace edgellm
