"""The vocabulary of the stories: characters, things and places."""

GIRLS = tuple(
    "Mia Lily Anna Rosa Nora Ella Ruby Luna Daisy Clara Zoe Ivy Hazel Maya Nina Poppy Tilly Molly Wren Juno Olive Pearl "
    "Sofia Amina Leila Freya Bella Penny".split()
)
BOYS = tuple(
    "Tom Ben Max Leo Sam Finn Oscar Hugo Theo Milo Jack Noah Otto Felix Pip Toby Ravi Omar Kai Luca Jasper Rusty Bruno "
    "Charlie Eli Gus Henry Arlo".split()
)
# Parts of invented names, so that the model learns to copy a name it has never seen.
FIRST_SYLLABLES = tuple(
    "Ba Bo Da Di Do Fa Fi Ga Go Ha Jo Ka Ke Ki La Lo Lu Ma Mo Na Ne No Pa Po Ra Ri Ro Sa Ta Ti To Va Vi Wi Za".split()
)
LAST_SYLLABLES = tuple(
    "bin bo dan della do fin go ka kin la lan lo lu mi min mo na nell no ra ri ro ron sha sto ta to vi vo zu".split()
)

# kind: (what one notices about it, where it lives)
KINDS: dict[str, tuple[str, str]] = {
    "fox": ("a bushy tail", "den"),
    "rabbit": ("long soft ears", "burrow"),
    "bear": ("big round paws", "cave"),
    "mouse": ("tiny pink feet", "hole in the wall"),
    "owl": ("wide yellow eyes", "hollow tree"),
    "hedgehog": ("brown prickles", "bed of leaves"),
    "squirrel": ("a fluffy tail", "oak tree"),
    "badger": ("a striped face", "sett"),
    "frog": ("shiny green skin", "lily pond"),
    "duck": ("orange feet", "nest in the reeds"),
    "otter": ("smooth brown fur", "river bank"),
    "beaver": ("strong front teeth", "lodge"),
    "mole": ("velvet fur", "tunnel"),
    "deer": ("long thin legs", "clearing"),
    "wolf": ("a thick gray coat", "den"),
    "cat": ("white whiskers", "basket by the fire"),
    "dog": ("floppy ears", "kennel"),
    "horse": ("a long brown mane", "stable"),
    "pony": ("a curly mane", "stable"),
    "donkey": ("very long ears", "barn"),
    "goat": ("two small horns", "shed"),
    "sheep": ("thick white wool", "meadow"),
    "lamb": ("soft white curls", "meadow"),
    "pig": ("a curly tail", "pen"),
    "cow": ("a brown patch on one eye", "barn"),
    "hen": ("speckled feathers", "coop"),
    "goose": ("a long white neck", "pond"),
    "swan": ("snowy wings", "lake"),
    "robin": ("a bright red chest", "nest"),
    "sparrow": ("quick brown wings", "nest"),
    "crow": ("glossy black feathers", "tall pine"),
    "turtle": ("a round green shell", "pool"),
    "snail": ("a curly shell", "garden pot"),
    "bee": ("two clear wings", "hive"),
    "ladybird": ("seven black spots", "rose bush"),
    "lizard": ("a quick little tongue", "warm rock"),
    "seal": ("round dark eyes", "rocky shore"),
    "penguin": ("short black wings", "icy beach"),
    "elephant": ("a long gray trunk", "valley"),
    "lion": ("a golden mane", "cave"),
    "tiger": ("dark stripes", "jungle"),
    "monkey": ("a long curly tail", "tree house"),
    "panda": ("black and white fur", "bamboo grove"),
    "kangaroo": ("strong back legs", "grassy plain"),
    "koala": ("a big soft nose", "gum tree"),
    "giraffe": ("a very long neck", "savanna"),
}
# Rare characters, so that a request may name almost any of them.
RARE_KINDS = tuple(
    "dragon unicorn robot parrot camel zebra hippo rhino moose raccoon skunk weasel ferret hamster gerbil puppy kitten chick "
    "duckling piglet calf foal whale dolphin octopus crab lobster starfish walrus pelican seagull heron stork pigeon dove "
    "eagle hawk falcon peacock turkey rooster toad newt salamander crocodile alligator snake worm spider ant beetle cricket "
    "butterfly moth firefly dragonfly bat possum wombat llama yak bison buffalo leopard cheetah jaguar lynx gorilla giant "
    "troll gnome elf fairy wizard witch princess prince king queen knight pirate farmer baker sailor painter".split()
)

# thing: what it does when one looks at it
THINGS: dict[str, tuple[str, str]] = {
    "lantern": ("It shone with a soft golden light.", "It made the dark feel friendly."),
    "kite": ("It danced high in the wind.", "Its long tail waved in the sky."),
    "key": ("It glittered in the sun.", "It looked old and full of secrets."),
    "drum": ("It went boom, boom, boom.", "It made everyone want to march."),
    "bell": ("It rang with a clear sweet sound.", "It sang whenever it was shaken."),
    "ball": ("It bounced higher than a fence.", "It rolled as fast as the wind."),
    "hat": ("It had a feather on one side.", "It was just the right size."),
    "scarf": ("It was as warm as a hug.", "It was soft and very long."),
    "book": ("It was full of pictures of ships and stars.", "Its pages smelled of summer."),
    "map": ("It showed every path and every stream.", "There was a small cross in one corner."),
    "basket": ("It could hold a hundred berries.", "It creaked a little when it was carried."),
    "boat": ("It floated like a leaf.", "It had a tiny white sail."),
    "whistle": ("It could be heard across the hills.", "It sounded like a happy bird."),
    "button": ("It was as round as the moon.", "It had four neat holes."),
    "ribbon": ("It fluttered in the breeze.", "It was as smooth as water."),
    "shell": ("It held the sound of the sea.", "It was pink inside."),
    "stone": ("It was smooth and cool.", "It sparkled when it was wet."),
    "feather": ("It was as light as a breath.", "It tickled everyone it touched."),
    "mirror": ("It caught the light and threw it on the wall.", "It showed a smiling face."),
    "spoon": ("It was perfect for stirring soup.", "It gleamed like a little moon."),
    "teapot": ("It had a chip on the spout.", "It puffed small clouds of steam."),
    "cup": ("It had a blue flower on the side.", "It kept the cocoa warm."),
    "umbrella": ("It opened like a big flower.", "It kept off every drop of rain."),
    "blanket": ("It was as soft as a cloud.", "It smelled of lavender."),
    "pillow": ("It was plump and cozy.", "It was filled with the softest down."),
    "flute": ("It played a gentle tune.", "Its song floated over the fields."),
    "violin": ("It sang like the evening wind.", "Its music made the stars listen."),
    "trumpet": ("It was very loud and very shiny.", "It could wake the whole valley."),
    "wagon": ("It had four squeaky wheels.", "It was big enough for two."),
    "sled": ("It slid over the ground like a dream.", "It was faster than a bird."),
    "ladder": ("It reached up to the highest branch.", "It had ten strong steps."),
    "rope": ("It was long and very strong.", "It never came undone."),
    "bucket": ("It was never empty for long.", "It had a shiny handle."),
    "shovel": ("It was good at digging.", "It had a smooth wooden handle."),
    "candle": ("It gave a small warm light.", "Its flame danced and never went out."),
    "clock": ("It went tick, tock, tick, tock.", "It was always five minutes late."),
    "compass": ("It always pointed the way home.", "Its needle trembled like a leaf."),
    "crown": ("It was made of paper and glitter.", "It shone like a little sun."),
    "coat": ("It had six deep pockets.", "It was warm from top to bottom."),
    "mitten": ("It was knitted from thick wool.", "It was meant for a very small hand."),
    "boot": ("It squeaked with every step.", "It was made for big puddles."),
    "pebble": ("It was round and speckled.", "It fitted in the smallest pocket."),
    "acorn": ("It wore a neat little cap.", "It was as shiny as a new coin."),
    "seed": ("It was no bigger than a crumb.", "It held a whole flower inside."),
    "pumpkin": ("It was as round as a full moon.", "It was almost too heavy to lift."),
    "cake": ("It smelled of honey and lemon.", "It was covered with sweet berries."),
    "pie": ("It smelled of apples and warm butter.", "It had a star cut in the top."),
    "letter": ("It was tied with a thin string.", "It smelled faintly of roses."),
    "paintbrush": ("It left a trail of bright color.", "It could paint the finest line."),
    "telescope": ("It made the far hills look near.", "It could see the mountains of the moon."),
    "marble": ("It had a blue swirl inside.", "It caught every bit of light."),
    "puppet": ("It bowed whenever its strings were pulled.", "It had a funny painted smile."),
    "balloon": ("It bobbed and tugged at its string.", "It was as round as an apple."),
    "music box": ("It played a slow and lovely tune.", "A tiny dancer turned inside it."),
}
RARE_THINGS = tuple(
    "apple pear banana cherry mushroom pancake sandwich cookie pretzel cheese carrot potato onion melon turnip guitar piano "
    "harp banjo chair table lamp broom pot pan plate fork bottle jar box chest bag purse coin ring necklace bracelet crystal "
    "diamond jewel star rocket train truck car bicycle scooter skateboard robot toy doll teddy-bear puzzle pencil crayon "
    "notebook painting poster flag tent canoe raft anchor net fishing-rod hammer saw wheel gear magnet camera radio flashlight "
    "battery computer telephone window door statue vase flower rose tulip sunflower leaf pinecone nut bone egg nest sock shoe "
    "glove belt dress cape mask wand potion spellbook sword shield helmet snowball icicle fossil".split()
)
LOOKS = tuple(
    "little old red blue green yellow silver golden shiny wooden tiny painted bright pretty lovely special orange purple".split()
)
TRAITS = tuple(
    "small kind brave clever shy cheerful gentle curious lazy busy quiet young playful happy sleepy careful friendly lonely".split()
)
FEELINGS = tuple("happy glad proud merry cheerful thankful delighted".split())
FOODS = tuple(
    "hot soup|apple pie|warm bread|berry jam|pancakes|honey cakes|cheese rolls|nut cookies|sweet plums|corn on the cob|"
    "cherry cake|toast".split("|")
)
FEARS = tuple("the dark|deep water|high places|loud noises|thunder|the wind|strangers|being alone".split("|"))
SKIES = tuple("sunny windy cloudy misty warm cold bright gray golden quiet".split())
HOURS = tuple("morning afternoon evening day".split())
# How a request names a plot: "a fox who loses a lantern".
DEEDS = {
    "afraid": "who is afraid",
    "found": "who finds a {thing}",
    "gift": "who looks for a gift",
    "lonely": "who has no friends",
    "lost": "who loses a {thing}",
    "making": "who wants to make a {thing}",
    "quarrel": "who wants the same {thing} as {friend}",
    "storm": "in a storm",
    "stuck": "who is very brave",
    "travel": "who goes on a journey",
}
