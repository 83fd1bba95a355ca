"""One job on several hosts: they find one another, agree on ranks, and learn of each other's failures.

handshake       connections to the host that leads: both ends prove that they know the job's secret
join            who leads a job on several hosts, and this host's way into it
leader          the leading host's end, in a thread of its own: one port, behind which the hosts meet and the store is
member          a host's end: dials the leader, proves itself, and speaks for this host's agent
membership      the rules by which hosts start, stop, start again and end. No sockets, clock, processes
messages        what the hosts say to each other: JSON objects, each behind its length
peer_hosts      what an agent needs from the other hosts of its job
relay           brings this host's workers to the store on the leader's host
restart_policy  after a failed attempt: what is said, and whether there is another
"""
