# One with texts to embed.
# README.md
gaudi-bert embed --model MODEL --data new.jsonl --out vectors.npy
