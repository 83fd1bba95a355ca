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
"""
