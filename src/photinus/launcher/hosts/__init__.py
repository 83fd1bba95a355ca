"""One job on several hosts: they find one another, agree on ranks, and learn of each other's failures.

secret      the words that only hosts of one job know
handshake   how both ends of a connection prove that they know them
ports       listening, and who holds a port that is taken
messages    what the hosts say to each other, as JSON
meeting     the rules: who is there, when to start, stop, start again, end (no sockets, no clock)
leader      carries the rules out for the host that leads
relay       brings the workers of the other hosts to the leader's store
member      one host's end of it
joining     finds out who leads, and joins

Started from one place, over ssh:

hostfile     the file of hosts, as DeepSpeed and Open MPI have it
selection    --include, --exclude, --num-nodes, --num-gpus: which hosts and devices a job gets
ssh          the conductor: the process that the user typed, which starts `photinus run` on every host
  ssh_host     one host, seen from there
  ssh_command  how it is reached, and whether it is this one
  ssh_words    the words of `photinus run` for it
  ssh_environ  the environment variables that it is given
  ssh_lines    the output of all hosts on one terminal
  ssh_trouble  why a host could not be started, and what to do
far          the far side: what is started on each host
  far_frames   what travels between the two
  far_job      the `photinus run` that it starts
  far_listen   the port at which the other hosts meet the first
  far_probe    its answers to `photinus doctor --hosts`
"""
