// Calls the kernels as a C program would, with each instruction set that the processor has, and compares what
// they write with stored rows: `c_interface FILE`, where record_calls.py has written the file.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "attention/call.h"
#include "sampling/call.h"
#include "step/call.h"

extern "C" {
const char* edgellm_isa();
int edgellm_set_isa(const char*);
void edgellm_append(const edgellm::AppendCall*);
void edgellm_attend(const edgellm::AttendCall*);
void edgellm_linear(const edgellm::LinearCall*);
void edgellm_candidates(const edgellm::CandidatesCall*);
int32_t edgellm_step(const edgellm::StepCall*);
size_t edgellm_step_workspace(const edgellm::StepCall*);
double edgellm_log_sum_exp(const float*, int64_t);
int64_t edgellm_top_k(const float*, int64_t, int64_t, int64_t*);
}

namespace {

// Arguments of the two functions that take no structure.
struct ScoresCall {
    const float* scores;
    int64_t count, k;
    int64_t* ids;
    double* sum;
};

enum class Type : int64_t { F32, F64, I8, U8, U16, I64 };

double number(Type type, const char* data, size_t i) {
    const auto at = [&](auto sample) {
        std::memcpy(&sample, data + i * sizeof sample, sizeof sample);
        return static_cast<double>(sample);
    };
    switch (type) {
        case Type::F32: return at(float{});
        case Type::F64: return at(double{});
        case Type::I8: return at(int8_t{});
        case Type::U8: return at(uint8_t{});
        case Type::U16: return at(uint16_t{});
        default: return at(int64_t{});
    }
}

class Reader {
public:
    explicit Reader(const char* path) : file_(std::fopen(path, "rb")) {
        if (file_ == nullptr) fail("cannot open the file of calls");
    }
    ~Reader() { std::fclose(file_); }

    bool at_end() {
        const int next = std::fgetc(file_);
        std::ungetc(next, file_);
        return next == EOF;
    }
    int64_t integer() {
        int64_t value;
        bytes(&value, sizeof value);
        return value;
    }
    double real() {
        double value;
        bytes(&value, sizeof value);
        return value;
    }
    std::vector<char> block() {
        std::vector<char> data(size_t(integer()), 0);
        if (integer() != 0) bytes(data.data(), data.size());
        return data;
    }
    [[noreturn]] static void fail(const char* words) {
        std::fprintf(stderr, "%s\n", words);
        std::exit(2);
    }

private:
    void bytes(void* out, size_t count) {
        if (std::fread(out, 1, count, file_) != count) fail("the file of calls ends too early");
    }
    std::FILE* file_;
};

// One call: its blocks of memory, the first of which is the structure, and what it is to write.
struct Call {
    struct Pointer {
        size_t block, offset, target;
    };
    struct Expected {
        size_t block;
        Type type;
        double tolerance;  // of the mean difference, in means of what is expected
        std::vector<char> data;
    };
    std::string name;
    std::vector<std::vector<char>> blocks;
    std::vector<Pointer> pointers;
    std::vector<Expected> expected;

    explicit Call(Reader& in) {
        const std::vector<char> text = in.block();
        name.assign(text.begin(), text.end());
        for (int64_t left = in.integer(); left > 0; --left) blocks.push_back(in.block());
        for (int64_t left = in.integer(); left > 0; --left) {
            const size_t block = size_t(in.integer()), offset = size_t(in.integer());
            pointers.push_back({block, offset, size_t(in.integer())});
        }
        for (int64_t left = in.integer(); left > 0; --left) {
            const size_t block = size_t(in.integer());
            const Type type = static_cast<Type>(in.integer());
            const double tolerance = in.real();
            expected.push_back({block, type, tolerance, in.block()});
        }
    }

    bool run() const {
        std::vector<std::vector<char>> memory = blocks;
        for (const Pointer& each : pointers) {
            const char* target = memory[each.target].data();
            std::memcpy(memory[each.block].data() + each.offset, &target, sizeof target);
        }
        dispatch(memory[0].data());
        bool right = true;
        for (const Expected& each : expected) right = near(each, memory[each.block].data()) && right;
        return right;
    }

private:
    void dispatch(char* call) const {
        if (name == "append") return edgellm_append(reinterpret_cast<edgellm::AppendCall*>(call));
        if (name == "attend") return edgellm_attend(reinterpret_cast<edgellm::AttendCall*>(call));
        if (name == "linear") return edgellm_linear(reinterpret_cast<edgellm::LinearCall*>(call));
        if (name == "candidates") return edgellm_candidates(reinterpret_cast<edgellm::CandidatesCall*>(call));
        if (name == "step") {
            auto* step = reinterpret_cast<edgellm::StepCall*>(call);
            std::vector<char> workspace(edgellm_step_workspace(step));
            step->workspace = workspace.data();
            if (!edgellm_step(step)) Reader::fail("a step was stopped");
            return;
        }
        const auto* scores = reinterpret_cast<ScoresCall*>(call);
        if (name == "top_k")
            edgellm_top_k(scores->scores, scores->count, scores->k, scores->ids);
        else if (name == "log_sum_exp")
            *scores->sum = edgellm_log_sum_exp(scores->scores, scores->count);
        else
            Reader::fail("a call of an unknown function");
    }

    bool near(const Expected& wanted, const char* found) const {
        const size_t size[] = {4, 8, 1, 1, 2, 8};
        double difference = 0, total = 0;
        for (size_t i = 0; i < wanted.data.size() / size[size_t(wanted.type)]; ++i) {
            const double right = number(wanted.type, wanted.data.data(), i);
            difference += std::fabs(number(wanted.type, found, i) - right);
            total += std::fabs(right);
        }
        if (difference <= wanted.tolerance * total) return true;  // NaN is not
        std::printf("%s, %s, block %d: off by %g of %g\n", edgellm_isa(), name.c_str(), int(wanted.block),
                    difference, total);
        return false;
    }
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) Reader::fail("usage: c_interface FILE");
    Reader in(arguments[1]);
    std::vector<Call> calls;
    while (!in.at_end()) calls.emplace_back(in);
    int wrong = 0;
    for (const char* isa : {"amx", "avx512", "avxvnni", "avx2", "neon", "scalar"}) {
        if (!edgellm_set_isa(isa)) continue;
        for (const Call& call : calls) wrong += !call.run();
        std::printf("%s: %d calls\n", isa, int(calls.size()));
    }
    return wrong != 0 || calls.empty();
}
