"""Names of `kvboost_hf.bench`."""

from kvboost_hf.bench.arms import ARMS, PLAIN, Arm, OurServer
from kvboost_hf.bench.environments import make_environment, peers_at_hand
from kvboost_hf.bench.models import Counted, Models
from kvboost_hf.bench.peer_process import PeerElsewhere, PeerError, PeerProcess
from kvboost_hf.bench.peers import PEERS, ContinuousBatching, Peer
from kvboost_hf.bench.run import Contender, Result, Row, Settings, run
from kvboost_hf.bench.served import Served, served
from kvboost_hf.bench.show import remarks
from kvboost_hf.bench.source import ModelSource
from kvboost_hf.bench.summary import summaries
from kvboost_hf.bench.turns import Turns
from kvboost_hf.bench.workloads import WORKLOADS
