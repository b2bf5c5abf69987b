"""Names of `kvboost_hf.bench`."""

from kvboost_hf.bench.arms import ARMS, PLAIN, Arm, OurServer
from kvboost_hf.bench.environments import PeerElsewhere, PeerError, PeerProcess, make_environment, peers_at_hand
from kvboost_hf.bench.models import Counted, ModelOrigin, Models
from kvboost_hf.bench.peers import PEERS, ContinuousBatching, Peer
from kvboost_hf.bench.run import Contender, MeasuredRow, Result, Series, Settings, run
from kvboost_hf.bench.served import Served, ServerTurns, served
from kvboost_hf.bench.show import remarks, summaries
from kvboost_hf.bench.workloads import WORKLOADS
