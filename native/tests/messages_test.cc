// send and recv: order, tags, sizes, both kinds of memory, any source, and what happens when the two ends
// disagree.
#include <unistd.h>

#include <numeric>

#include "check.h"
#include "data.h"

using namespace photinus;
using namespace photinus::test;

namespace {

MessageCall call(Operation operation, std::vector<int32_t>& data, uint32_t peer, int64_t tag = 0,
                 bool asynchronous = true) {
  MessageCall made;
  made.operation = operation;
  made.dtype = Dtype::int32;
  made.elems = data.size();
  made.buffer = data.data();
  made.peer = peer;
  made.tag = tag;
  made.asynchronous = asynchronous;
  return made;
}

std::vector<int32_t> numbers(uint64_t elems, int32_t first) {
  std::vector<int32_t> data(elems);
  std::iota(data.begin(), data.end(), first);
  return data;
}

}  // namespace

TEST_ANY_PEERS(messages_of_every_size_arrive_in_both_directions_at_once) {
  run_ranks(2, [](Communicator& communicator) {
    const uint32_t me = communicator.rank(), peer = 1 - me;
    for (uint64_t elems : {0, 1, 100, 40000, 131072, 1000003}) {
      for (bool in_arena : {false, true}) {
        auto out = numbers(elems, static_cast<int32_t>(me)), in = std::vector<int32_t>(elems, -1);
        MessageCall send = call(Operation::send, out, peer);
        std::byte* block = communicator.arena()->allocate(elems * 4);
        if (in_arena) {
          if (elems) std::memcpy(block, out.data(), elems * 4);
          send.buffer = block;
        }
        auto sent = communicator.submit(send);
        communicator.submit(call(Operation::recv, in, peer, 0, false))->wait();
        sent->wait();
        CHECK(in == numbers(elems, static_cast<int32_t>(peer)));
        communicator.arena()->free(block);
      }
    }
  });
}

TEST_ANY_PEERS(messages_with_one_tag_keep_their_order_and_tags_may_overtake) {
  run_ranks(2, [](Communicator& communicator) {
    std::vector<std::vector<int32_t>> data(30);
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 30; ++i) {
      if (communicator.rank() == 0) {
        data[i] = numbers(10 + i / 3, 100 * i);
        works.push_back(communicator.submit(call(Operation::send, data[i], 1, i % 3)));
      } else {
        // The last tag is received first: ten messages of others wait meanwhile.
        const int message = i / 10 == 0 ? 3 * i + 2 : i / 10 == 1 ? 3 * (i - 10) + 1 : 3 * (i - 20);
        data[message].resize(10 + message / 3);
        works.push_back(communicator.submit(call(Operation::recv, data[message], 0, message % 3)));
      }
    }
    for (auto& work : works) work->wait();
    for (int i = 0; i < 30; ++i) CHECK(data[i] == numbers(10 + i / 3, 100 * i));
  });
}

TEST_ANY_PEERS(a_message_from_any_rank_tells_where_it_came_from) {
  run_ranks(4, [](Communicator& communicator) {
    if (communicator.rank() == 0) {
      std::vector<bool> seen(4);
      for (int i = 0; i < 3; ++i) {
        std::vector<int32_t> in(5);
        auto work = communicator.submit(call(Operation::recv, in, kAnyRank, 7));
        work->wait();
        CHECK(work->source_rank() > 0 && !seen[static_cast<size_t>(work->source_rank())]);
        seen[static_cast<size_t>(work->source_rank())] = true;
        CHECK(in == numbers(5, work->source_rank()));
      }
    } else {
      auto out = numbers(5, static_cast<int32_t>(communicator.rank()));
      communicator.submit(call(Operation::send, out, 0, 7))->wait();
    }
  });
}

TEST_ANY_PEERS(ends_that_disagree_are_both_refused_and_the_group_stays_usable) {
  run_ranks(2, [](Communicator& communicator) {
    const uint32_t me = communicator.rank();
    auto data = numbers(me == 0 ? 10 : 11, 0);
    const Operation mine = me == 0 ? Operation::send : Operation::recv;
    auto [kind, message] = error_of([&] { communicator.submit(call(mine, data, 1 - me))->wait(); });
    CHECK(kind == ErrorKind::mismatch);
    CHECK_CONTAINS(message, "called send of int32[10]");
    CHECK_CONTAINS(message, "called recv of int32[11]");
    data.resize(10);
    communicator.submit(call(mine, data, 1 - me))->wait();
  });
}

TEST_ANY_PEERS(messages_run_beside_collectives_in_any_order) {
  run_ranks(3, [](Communicator& communicator) {
    const uint32_t me = communicator.rank();
    for (int round = 0; round < 50; ++round) {
      auto out = numbers(3000, 1), in = std::vector<int32_t>(3000);
      std::vector<float> data(9000, 1.0f);
      std::vector<std::shared_ptr<Work>> works;
      auto collective = [&] {
        works.push_back(
            communicator.submit({Operation::all_reduce, Dtype::float32, Reduction::sum, 0, data.size()},
                                data.data(), data.data()));
      };
      auto ring = [&] {
        works.push_back(communicator.submit(call(Operation::send, out, (me + 1) % 3)));
        works.push_back(communicator.submit(call(Operation::recv, in, (me + 2) % 3)));
      };
      if ((me + round) % 2)
        collective(), ring();
      else
        ring(), collective();
      for (auto& work : works) work->wait();
      CHECK(data[8999] == 3.0f && in == out);
    }
  });
}

TEST_ANY_PEERS(every_message_may_have_a_tag_of_its_own) {
  run_ranks(2, [](Communicator& communicator) {
    for (int tag = 0; tag < 1000; ++tag) {
      std::vector<int32_t> data{tag};
      const bool sends = (communicator.rank() + static_cast<uint32_t>(tag)) % 2;
      auto made =
          call(sends ? Operation::send : Operation::recv, data, 1 - communicator.rank(), tag, tag % 3 == 0);
      communicator.submit(made)->wait();
      CHECK(data[0] == tag);
    }
  });
}

TEST(wrong_peers_are_refused_at_once) {
  run_ranks(2, [](Communicator& communicator) {
    auto data = numbers(3, 0);
    auto refused = [&](const MessageCall& made) {
      auto [kind, message] = error_of([&] { communicator.submit(made); });
      CHECK(kind == ErrorKind::invalid_argument);
      return message;
    };
    CHECK_CONTAINS(refused(call(Operation::send, data, 2)), "2 is not a rank of this group of 2");
    CHECK_CONTAINS(refused(call(Operation::send, data, communicator.rank())), "with itself");
    CHECK_CONTAINS(refused(call(Operation::send, data, kAnyRank)), "is not a rank");
  });
}
