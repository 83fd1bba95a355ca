// The handshake of a connection: both ends prove that they know the group's secret, before either believes a
// word. It is the launcher's construction (src/photinus/job/channel.py) with messages of fixed
// size; here are the messages, without sockets.
//
//   listener -> caller   challenge: version, byte order, a nonce
//   caller -> listener   claim: version, byte order, who it is, whom it wants, a nonce, proof
//   listener -> caller   verdict: accepted, refused or not yet, who it is, the reason, proof
//
// A proof is HMAC-SHA256 under the key over the side's name and all that both have said before. So nothing
// heard on the wire can be used again, and neither side can be made to answer for the other. A claim is
// believed only with its proof; before that, what it says is quoted, at most. A verdict without a proof is
// that of a listener that does not know the claim's group or secret, or speaks another version. What follows
// the handshake is neither encrypted nor proved.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "net/sha256.h"

namespace photinus {

inline constexpr uint32_t kLinkVersion = 2;
inline constexpr size_t kNameBytes = 64;  // of a job, a group or a host, with the zero at its end

// What a process speaks; both ends must speak the same.
struct Dialect {
  uint32_t version = kLinkVersion;
  char byte_order = own_byte_order();  // of frames: 'l', or 'b' for big endian
  static char own_byte_order();
  bool operator==(const Dialect&) const = default;
  std::string text() const;  // "version 2, little endian"
};

// A process as a member of a group.
struct Membership {
  std::string job, group;  // at most 63 bytes each
  uint32_t attempt = 0;    // of the job, counted by its launcher
  uint32_t rank = 0, ranks = 0;
  int pid = 0;
  std::string host;
  Digest key{};

  std::string who() const;       // "rank 1 (pid 71 on host-b)"
  std::string of_group() const;  // "group 0 of job 7c2f", printable
};

// The key of a group: of its secret and the job's name, so that each keeps jobs apart.
Digest key_of(const std::string& secret, const std::string& job);

using Challenge = std::array<uint8_t, 64>;
using Claim = std::array<uint8_t, 512>;
using Verdict = std::array<uint8_t, 640>;
using Token = std::array<uint8_t, 16>;  // of one attempt to make a link: its streams belong together

Challenge make_challenge(const Dialect& dialect = {});
// Why this is not the challenge of a listener that this end can talk to; empty if it is.
std::string fault_of(const Challenge& challenge, const Dialect& own = {});

// Other characters are question marks.
std::string printable(std::string text);

// What a claim says. The host is printable; job and group are as they were sent, to be looked up.
struct Claimed {
  bool is_photinus = false;  // if not, nothing else is set
  Dialect dialect;           // if another one, nothing else is set
  Membership from;           // without a key
  uint32_t to = 0;
  uint8_t stream = 0, streams = 0;
  Token token{};
};
Claim make_claim(const Challenge& heard, const Membership& own, uint32_t to, uint8_t stream, uint8_t streams,
                 const Token& token, const Dialect& dialect = {});
Claimed read(const Claim& claim);
bool is_proved(const Claim& claim, const Challenge& said, const Digest& key);

enum class Answer : uint8_t { accepted = '+', refused = '-', not_yet = '?' };
// Whether a claim fits the group that it is about; `own` is null when there is no such group here (yet).
struct Judgement {
  Answer answer = Answer::accepted;
  std::string reason;
  bool is_member = false;  // it has proved that it knows the secret
};
Judgement judge(const Claim& claim, const Challenge& said, const Membership* own, uint8_t streams,
                const Dialect& dialect = {});

// Proved when `own` is given; that of a stranger is not.
Verdict make_verdict(const Judgement& judgement, const Membership* own, const Claim& heard,
                     const Challenge& said, const Dialect& dialect = {});
struct Heard {
  bool is_photinus = false;
  bool is_proved = false;
  Answer answer = Answer::refused;
  Membership from;  // set when it is proved
  std::string reason;
};
Heard read(const Verdict& verdict, const Claim& said, const Challenge& heard, const Membership& own);

}  // namespace photinus
