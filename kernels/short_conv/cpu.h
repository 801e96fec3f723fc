// The gated short convolution C * conv(B * x); included once for each instruction set.
//
// A state is [taps - 1, channels]: B * x of the last rows, the oldest first.

// Some channels of a span are an item: its rows are worked through in their order, with whole cache lines side by side.
// give(y, first, end, r): what these groups of channels are of row r.
template <typename Give>
inline void short_conv(edgellm::Worker& worker, const edgellm::ShortConv& conv, const edgellm::Mixing& mixing,
                       const Give& give) {
    const int channels = conv.channels(), groups = channels / edgellm::GROUP, before = conv.taps - 1;
    const int run = std::max(1, groups / (4 * mixing.call.threads)), runs = (groups + run - 1) / run;
    worker.each(mixing.span_count() * runs, [&](int item) {
        const int span = item / runs, first = item % runs * run, end = std::min(groups, first + run);
        const int width = (end - first) * edgellm::GROUP;
        const size_t from = size_t(first) * edgellm::GROUP;
        // of the rows before and, at the end, of the row itself
        float* past = static_cast<float*>(edgellm::scratch(4 * size_t(conv.taps + 1) * width));
        float *now = past + before * width, *y = now + width;
        const float* state = mixing.before(span);
        for (int k = 0; k < before; ++k)
            for (int i = 0; i < width; i += LANES)
                store(past + k * width + i, state ? load(state + size_t(k) * channels + from + i) : Vec{});
        const auto row = [&](int r) {
            const float *b = mixing.row(r) + from, *c = b + channels, *x = c + channels;
            for (int i = 0; i < width; i += LANES) {
                store(now + i, load(b + i) * load(x + i));
                Vec sum = {};
                for (int k = 0; k <= before; ++k)
                    sum += load(conv.filters + size_t(k) * channels + from + i) * load(past + k * width + i);
                store(y + i, sum * load(c + i));
            }
            std::memmove(past, past + width, 4 * size_t(before) * width);
            give(y, first, end, r);
        };
        mixing.walk(span, row, [&](float* after) {
            for (int k = 0; k < before; ++k)
                std::memcpy(after + size_t(k) * channels + from, past + k * width, 4 * size_t(width));
        });
    });
}

inline void short_conv(const edgellm::ShortConvCall& call) {
    const edgellm::RowsAlone alone(call.spans, call.span_count, call.count, call.threads);
    const int channels = call.conv.channels();
    const edgellm::Mixing mixing = alone.mixing(call.rows, 3 * channels);
    edgellm::run_team(call.threads, 1, [&](edgellm::Worker& worker) {
        short_conv(worker, call.conv, mixing, [&](const float* y, int first, int end, int r) {
            const size_t at = size_t(first) * edgellm::GROUP, bytes = 4 * size_t(end - first) * edgellm::GROUP;
            std::memcpy(call.out + size_t(r) * channels + at, y, bytes);
        });
    });
}
