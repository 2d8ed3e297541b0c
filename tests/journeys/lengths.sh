# One who only wants to pack lengths.
# README.md
gaudi-bert estimate wikipedia-512
python -c 'from gaudi_bert import pack_lengths; print(len(pack_lengths([128, 17, 300, 64, 212, 500, 9, 450], 512)))'
