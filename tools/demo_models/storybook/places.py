"""The places of the stories: prepositions, what one notices there, and where small things hide."""

from dataclasses import dataclass

INDOORS = ("cave", "school", "library", "attic", "kitchen", "castle", "train station", "old barn", "mill", "lighthouse")


@dataclass(frozen=True, slots=True)
class Place:
    """A place: `noun` for prompts, `at` and `to` for sentences."""

    noun: str
    at: str
    to: str
    details: tuple[str, ...]
    spots: tuple[str, ...]

    @property
    def is_outdoors(self) -> bool:
        return self.noun not in INDOORS


def _place(noun: str, at: str, to: str, details: str, spots: str) -> Place:
    return Place(noun, f"{at} the {noun}", f"{to} the {noun}", tuple(details.split("|")), tuple(spots.split("|")))


PLACES = (
    _place("forest", "in", "into", "The tall trees whispered to one another.|The path was soft with moss.",
           "behind an old oak tree|under a pile of dry leaves|beside a mossy log"),
    _place("garden", "in", "into", "Bees hummed around the roses.|The beans climbed up their poles.",
           "between two cabbages|under a flower pot|behind the watering can"),
    _place("meadow", "in", "to", "The tall grass swayed like water.|Butterflies danced over the daisies.",
           "among the daisies|in the long grass|next to a molehill"),
    _place("beach", "on", "to", "The waves rolled in and out.|The sand was warm and white.",
           "behind a rock|half buried in the sand|under a heap of seaweed"),
    _place("river", "by", "to", "The water sang over the stones.|Silver fish jumped in the sun.",
           "among the reeds|under the bridge|between two flat stones"),
    _place("lake", "by", "to", "The water was as still as glass.|A thin mist lay over the water.",
           "under an old rowing boat|near the wooden pier|beside a willow tree"),
    _place("hill", "on", "up", "The wind blew from every side.|From the top one could see the whole valley.",
           "beside the crooked tree|behind a gray boulder|in a patch of clover"),
    _place("mountain", "on", "up", "The air was cool and clear.|Far below, the village looked like a toy.",
           "in a narrow crack|under a snowy ledge|beside a small spring"),
    _place("cave", "in", "into", "Drops of water fell one by one.|Every sound came back as an echo.",
           "in the darkest corner|behind a tall stone|on a dusty ledge"),
    _place("village", "in", "to", "Smoke curled from the chimneys.|Neighbors called to each other across the street.",
           "beside the well|behind the bakery|on the church steps"),
    _place("market", "at", "to", "The stalls were full of fruit and flowers.|Everyone was talking at once.",
           "under a fruit stall|behind a stack of crates|next to the cheese cart"),
    _place("farm", "on", "to", "The hens scratched in the yard.|The hay smelled sweet and dry.",
           "in the hay|behind the tractor|beside the feed bins"),
    _place("park", "in", "to", "The fountain splashed in the sun.|Children ran across the grass.",
           "under a bench|behind the fountain|near the swings"),
    _place("school", "at", "to", "The hall was full of paintings.|Someone was singing in the music room.",
           "under a desk|behind the big blackboard|on the highest shelf"),
    _place("library", "in", "to", "The shelves reached up to the ceiling.|It was so quiet that one could hear the pages turn.",
           "between two fat books|under the reading table|behind a globe"),
    _place("attic", "in", "up to", "Dust danced in a ray of light.|Old trunks stood along the wall.",
           "in a dusty trunk|behind a broken chair|under a white sheet"),
    _place("kitchen", "in", "into", "The kettle hummed on the stove.|It smelled of cinnamon and bread.",
           "behind the flour jar|in the bottom drawer|under the sink"),
    _place("castle", "in", "to", "Long banners hung from the towers.|Their steps echoed in the great hall.",
           "behind a suit of armor|under a stone stair|in the highest tower"),
    _place("island", "on", "to", "The palm trees bent in the breeze.|Gulls circled over the bay.",
           "under a palm tree|inside an old barrel|in a ring of stones"),
    _place("desert", "in", "into", "The sand glowed like gold.|The sky was wide and blue.",
           "behind a tall cactus|under a flat rock|in the shade of a dune"),
    _place("jungle", "in", "into", "Bright birds called from the treetops.|Vines hung down like curtains.",
           "behind a giant fern|inside a hollow trunk|under a broad leaf"),
    _place("orchard", "in", "to", "Red apples shone among the leaves.|The grass was full of fallen blossoms.",
           "at the foot of an apple tree|under a ladder|in a basket of pears"),
    _place("harbor", "at", "to", "The boats bobbed up and down.|The air smelled of salt and tar.",
           "inside a coil of rope|behind a fishing net|under an empty crate"),
    _place("lighthouse", "at", "to", "The great lamp turned slowly.|The sea roared against the rocks.",
           "on the winding stairs|behind the great lamp|beneath a small window"),
    _place("bridge", "on", "to", "The boards creaked under every step.|The stream below sparkled and chattered.",
           "beneath a loose board|beside the railing|at the far end"),
    _place("mill", "at", "to", "The big wheel turned and splashed.|White flour covered everything.",
           "among the flour sacks|behind the millstone|near the water wheel"),
    _place("train station", "at", "to", "The big clock ticked above the doors.|A whistle blew and steam filled the air.",
           "under a suitcase|behind the ticket booth|at the end of the platform"),
    _place("old barn", "in", "into", "Swallows darted in and out.|Sunlight fell through the gaps in the roof.",
           "up in the loft|under the wagon|behind the straw bales"),
)  # fmt: skip
