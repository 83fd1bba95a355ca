// A TCP connection as a stream, and the options of one.
#pragma once

#include <memory>
#include <string>

#include "net/private_descriptor.h"
#include "net/stream.h"

namespace photinus {

struct TcpOptions {
  std::string congestion_control;  // "reno", "cubic", "bbr", ...; empty: the system's
  int send_buffer_bytes = 0;       // SO_SNDBUF; 0: the kernel sizes it
  int receive_buffer_bytes = 0;    // SO_RCVBUF; 0: the kernel sizes it
  // The longest pause between retransmissions (Linux 6.15; without effect before): it bounds how long a link
  // stays silent after the network has come back. 0: the system's, two minutes. endure() makes it longer.
  int longest_retransmission_ms = 2000;
};

// Sets what must be set before connecting or listening. Throws Error(invalid_argument), which names the
// congestion controls that there are, or Error(system).
void set_options(int socket, const TcpOptions& options);

class TcpStream final : public Stream {
 public:
  // A connected socket that does not block.
  explicit TcpStream(PrivateDescriptor socket) : socket_(std::move(socket)) {}

  Result read(const iovec* pieces, int count) override;
  Result write(const iovec* pieces, int count) override;
  void set_low_water(size_t bytes) override;
  void endure(double silence_s) override;
  void finish_writing() override;
  std::string fault() const override;
  bool is_fault_of_peer() const override;
  StreamCounts counts() const override;
  bool has_bytes_under_way() const override;

  int number() const { return socket_.get(); }

 private:
  Result failed(int error);

  PrivateDescriptor socket_;
  std::atomic<int> error_{0};
};

}  // namespace photinus
