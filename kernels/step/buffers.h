// Buffers of a step, cut out of the caller's workspace. Each begins with a cache line, so that threads
// do not write to each other's.
struct Buffers {
    int32_t* chosen;  // [rows, KV heads, blocks], numbers of those that a row reads
    float *residual, *branch, *mixed, *parts;  // branch: what a norm takes before it is added
    float *q, *delta;  // rotated queries, or rows behind a convolution; between the phases of a delta net
    float *first_stream, *other_streams, *laurel;  // [rows, hidden], [rows, (streams - 1) * hidden], [rows, hidden]
    float *gates, *cutoffs;                        // of an MLP whose gates count above a cutoff
    edgellm::Rows x, first{};  // first: what enters layer 0, for layers that have embeddings of their own
    char *attended, *activated;  // rows of each layer's width
    Experts experts;
    Adapters adapters;

    static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

    Buffers(const edgellm::StepCall& call, const edgellm::Places& places, char* memory, size_t& bytes) {
        const edgellm::Transformer& m = *call.model;
        const int rows = call.count;
        int mixed_outputs = 0, width = 0, wide = 0, intermediate = 0, cut = 0;
        size_t delta_floats = 0, of_heads = 0;
        bool behind = false, laurels = false;
        bool inputs = m.streams > 1;
        for (int l = 0; l < m.layer_count; ++l) {
            const edgellm::Layer& layer = m.layers[l];
            mixed_outputs = std::max({mixed_outputs, layer.mixed_outputs(), layer.mamba2.inputs()});
            width = std::max({width, layer.o.inputs, layer.beside_o.inputs});
            wide = std::max({wide, layer.o.inputs, layer.mamba2.mixed()});
            if (layer.latent.there()) {
                const int most = std::max(layer.latent.key(), layer.latent.rank());
                of_heads = std::max(of_heads, HeadRows::bytes(layer.heads, rows, most));
                width = std::max(width, layer.latent.query_down.outputs);
                wide = std::max(wide, layer.heads * (layer.k.outputs + layer.latent.rank()));
                mixed_outputs = std::max(mixed_outputs, layer.o.inputs);
            }
            if (layer.mixer == edgellm::DELTA_NET)
                delta_floats = std::max(delta_floats, edgellm::DeltaNetBuffers::floats(layer.delta_net, rows));
            if (!layer.has_experts()) intermediate = std::max(intermediate, layer.up.outputs);
            behind = behind || layer.post_attention_norm.weight || layer.post_mlp_norm.weight || layer.has_input();
            inputs = inputs || layer.has_input();
            mixed_outputs = std::max(mixed_outputs, 2 * layer.input.gate.outputs);
            intermediate = std::max({intermediate, layer.input.gate.outputs, layer.laurel.left.outputs});
            laurels = laurels || layer.has_laurel();
            if (layer.cuts_off()) cut = std::max(cut, layer.up.outputs);
        }
        if (m.streams > 1) of_heads = std::max(of_heads, HeadRows::bytes(m.streams - 1, rows, m.hidden));
        size_t sums = 0, choices = 0;
        for (const edgellm::Heads& heads : places.kinds) {
            sums = std::max(sums, heads.floats());
            const int lists = places.sparse ? heads.heads : heads.kv_heads;
            choices = std::max(choices, size_t(places.choosing) * lists * places.chosen);
        }
        const auto take = [&](size_t size) {
            char* taken = memory + bytes;
            bytes += aligned(size);
            return taken;
        };
        const auto floats = [&](size_t count) { return reinterpret_cast<float*>(take(4 * count)); };
        residual = floats(size_t(rows) * m.hidden);
        branch = behind ? floats(size_t(rows) * m.hidden) : nullptr;
        mixed = floats(size_t(rows) * mixed_outputs);
        q = floats(size_t(rows) * wide);
        parts = floats(sums);
        chosen = reinterpret_cast<int32_t*>(take(4 * choices));
        delta = floats(delta_floats);
        first_stream = floats(m.streams > 1 ? size_t(rows) * m.hidden : 0);
        other_streams = floats(size_t(rows) * (m.streams - 1) * m.hidden);
        laurel = floats(laurels ? size_t(rows) * m.hidden : 0);
        gates = floats(size_t(rows) * cut);
        cutoffs = floats(cut ? rows : 0);
        x = edgellm::Rows::in(take(edgellm::Rows::bytes(rows, m.hidden)), rows, m.hidden);
        if (inputs) first = edgellm::Rows::in(take(edgellm::Rows::bytes(rows, m.hidden)), rows, m.hidden);
        attended = take(std::max(edgellm::Rows::bytes(rows, width), of_heads));
        activated = take(edgellm::Rows::bytes(rows, intermediate));
        experts = Experts(m, rows, call.threads, take);
        adapters = Adapters(call, take);
    }
};
