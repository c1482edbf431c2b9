"""Two checkouts of Paceline measured in turns: did a change make anything slower?"""
