// The gated short convolution C * conv(B * x); included once for each instruction set.
//
// A state is [taps - 1, channels]: B * x of the last rows, the oldest first.

// Some channels of a span are an item: rows of a span are worked through in their order.
inline void short_conv(edgellm::Worker& worker, const edgellm::ShortConv& conv, const edgellm::Mixing& mixing) {
    using edgellm::GROUP;
    const int channels = conv.channels(), groups = channels / GROUP, before = conv.taps - 1;
    worker.each(mixing.span_count() * groups, [&](int item) {
        const int span = item / groups, group = item % groups;
        const size_t first = size_t(group) * GROUP;
        float past[edgellm::MOST_TAPS][GROUP];  // of the rows before and, at the end, the row itself
        const float* state = mixing.before(span);
        for (int k = 0; k < before; ++k)
            for (int i = 0; i < GROUP; i += LANES)
                store(past[k] + i, state ? load(state + k * channels + first + i) : Vec{});
        const auto row = [&](int r) {
            const float *b = mixing.row(r) + first, *c = b + channels, *x = c + channels;
            float y[GROUP];
            for (int i = 0; i < GROUP; i += LANES) {
                store(past[before] + i, load(b + i) * load(x + i));
                Vec sum = {};
                for (int k = 0; k <= before; ++k)
                    sum += load(conv.filters + k * channels + first + i) * load(past[k] + i);
                store(y + i, sum * load(c + i));
            }
            std::memmove(past[0], past[1], before * sizeof(past[0]));
            quantize_groups(y, group, group + 1, mixing.out, r, false);
        };
        mixing.walk(span, row, [&](float* after) {
            for (int k = 0; k < before; ++k) std::memcpy(after + k * channels + first, past[k], sizeof(past[0]));
        });
    });
}
