"""The phrases that first messages are made of, by what they ask for: plain lists.

In lower case and without their last punctuation, as `first_exchanges` varies both. A name in braces
stands for a word of the list of that name. Knows no conversation and no tokens. Immutable.
"""

from __future__ import annotations


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(phrase.split()) for phrase in text.split("|"))


SOMEONE = _phrases("""\
there | baton | friend | my friend | everyone | all | buddy | dear | you | again | bot | sir |
robot | assistant | computer | ai | man | mate | team | folks | world | baton tiny | amigo
""")

HELLO = _phrases("""\
hello | hey | heya | hey hey | hello hello | yo | howdy | greetings | good afternoon | hiya |
hallo | hola | bonjour | ciao | salut | ola | hej | hei | guten tag | guten morgen | namaste |
ni hao | konnichiwa | salaam | shalom | merhaba | buongiorno | buenos dias | bom dia | aloha |
привет всем | здравствуйте | 你好吗 | 您好 | こんにちは | 안녕하세요 | مرحبا | नमस्ते |
welcome | hallo zusammen | moin | servus | gruezi | buenas | good to see you | nice to meet you |
pleased to meet you | hello from me | hey you | morning | hello i am new here | anyone here |
hola que tal | bonjour madame | hallo wie geht es | ciao come stai | привет друг | 你好啊 |
yo yo | yo man | hlo | helo there | helloo | hy | afternoon | good afternoon baton | good
afternoon all | morning everyone | evening | morning bot | ciao amico | ciao ragazzi | hey bot
hello | hello hello hello | heyo | howdy howdy | hej alla
""")

HOW_ARE_YOU = _phrases("""\
how are you doing | how are you today | how are you feeling | how are things | how is it going |
hows it going | how do you feel | whats up man | what is up | wassup | sup | how are u | hru |
how have you been | how is your day | are you well | are you doing well | hows life | how are
you my friend | hello how are you | hey how are you | hi how are you doing | good morning how
are you | are you fine | you ok | how goes it | hey whats up | what's up | how r you | how are
ya | how's your day going | how you doing | hope you are well |
are you okay | are you alright | are you doing ok | how do you do today | how do you do sir | u
ok | how are you doing today my friend | how goes the day | how have you been lately
""")

TEST = _phrases("""\
testing | this is a test | test 1 2 3 | just a test | only a test | test 123 | ping | ping ping
| testing testing | is it working | does it work | is this working | are you working | are you
on | are you alive | hello are you there | is anyone there | is anybody there | anyone there |
test 1 | test 2 | my test | a test | testing this | can you hear me | do you hear me | do you
read me | are you online | are you running | is this on | i am testing you | are you awake | you
there | does this thing work | testing your answers | test it | quick test |
are you there bot | you there bot | are you listening | testing one two three | testing it out
""")

THANKS = _phrases("""\
thank you | thank you very much | thanks so much | thank you so much for this | ty | thx a lot |
thanks a million | thanks again | thanks man | thank you my friend | many thanks to you | tnx |
merci | gracias | danke | danke schon | muchas gracias | grazie | obrigado | arigato | спасибо |
谢谢 | ok thank you | great thanks | cool thanks | perfect thank you | thanks for your help |
thank you for the answer | thanks that helps | i thank you | much appreciated | cheers | thanks
for that | nice thank you | awesome thanks | thanks buddy | thanks bot | thank you baton |
tysm man | thank you so so much | tyvm | thx man | thankyou | thank you all | thanx | ok ty |
thanks a bunch | thank you kindly | cheers mate thanks
""")

FAREWELL = _phrases("""\
goodbye | bye for now | bye then | see you | see you soon | see you tomorrow | see ya | later |
talk to you later | farewell | good bye | so long | take care | i am leaving | i must go | gotta
go | got to go now | i have to leave | have a good day | have a nice evening | ciao ciao | au
revoir | adios | auf wiedersehen | tschuss | hasta la vista | sayonara | пока | 再见 | good night
baton | goodnight | sleep well | bye baton | thanks bye | that is all | end | stop | close |
exit now | quit now | bye everyone | bye my friend | i am done | ok goodbye | cu | ttyl | hasta
luego amigo | until tomorrow | i will be back |
exit please | i want to exit | exit the chat | quit please | quit the chat | exit exit | quit it
| ok bye then | ok see you | bye now | ok bye bye | cya later | good night all | ok good night |
bye-bye then | alright bye
""")

ASKED_IDENTITY = _phrases("""\
who are you | what are you | what is your name | what's your name | whats your name | who is
this | who is there | what should i call you | do you have any name | tell me your name | are
you a bot | are you a robot | are you a human | are you a person | are you real | are you ai |
are you an artificial intelligence | are you a machine | are you a computer | are you a language
model | are you an llm | what model are you | which model is this | what kind of model are you |
what language model are you | are you gpt | are you gpt-5 | are you claude | are you gemini |
are you openai | are you qwen | are you llama | are you chat gpt | are you deepseek or mistral |
is this chatgpt | is this claude | is this a bot | who created you | who built you | who trained
you | who developed you | who is your creator | who owns you | where do you come from baton |
introduce yourself | please introduce yourself to me | tell me who you are | tell me something
about yourself | tell me about you | describe yourself | am i talking to a robot | am i talking
to a human | who am i speaking to | who am i chatting with | what is baton tiny | what is baton
| what version are you | how big are you | how many parameters do you have | name | what are u |
who r you | wer bist du | qui es tu | quien eres | 你是谁 | кто ты | are you conscious | are you
alive or a machine | so what are you | and who are you | whoami |
who are you really | what are you really | who exactly are you | so who are you exactly | what
exactly are you | what is your name exactly | your name please | ur name | your name is | name
please | what is ur name | say your name | tell me a bit about yourself | talk about yourself |
tell us about yourself | what model is that | what model am i talking to | which ai model is
this | what ai is this | what llm is this | do you have names | have you got a name | do you
even have a name | does this thing have a name | who is baton | are you baton | what is this
model | what kind of ai are you
""")

WHAT_CAN_YOU_DO = _phrases("""\
what can you do | how can you help me | what do you know | help please | please help | help me
please | i want help | can you help | could you help me please | i need your help | i need some
help with something | help me out | can you assist me | what are you able to do | what are you
good at | what are you for | what is your purpose | what is your job | what can i ask you | what
can i ask | what should i ask | what can i do here | how do i use you | how can i use this | how
do i start | where do i start | what now | what do i do | tell me what you can do | show me what
you know | show me something you can do | list your features | what features do you have | what
are your skills | your capabilities | what can this do | what does this do | what is this | how
do you work | how does it work | what are your functions | list of commands | show commands |
options | info | manual | show help | usage | give me some examples | an example please | what
can we talk about | what do you do | can you do anything | which languages do you speak | do you
speak german | do you speak french | can you speak spanish | do you understand english | can you
understand me | can i ask you something | can i ask a question | i have a question | i have a
request | can you answer questions | what else can you do | suggest something | what topics do
you know | how may you help me | could you tell me what you can do | help i am lost |
instructions | hello what can you do | hi can you help me | hey i need help | can u help me out |
help help | help!! me | helpp | halp | i need help please | help needed | can i get help | help
me out please | help with what | command list | which commands are there | what commands | the
menu please | show the menu | main menu | what is on the menu | show options | tell me your
capabilities | capabilities | abilities | features | tutorial | guide me | how do i use it |
what is possible here | what can i do | examples | show an example
""")

REMARKS = _phrases("""\
okay | oki | ok then | ok cool | okay okay | alright | all right | yes please | yeah | yep | yup
| nope | no thanks | not really | no no | cool cool | very cool | nice one | very nice | good |
very good | that is good | great job | well done | good job | good bot | haha | hahaha | lol ok
| wow cool | oh wow | amazing | awesome | perfect | sure thing | of course | hm | hmm ok | mhm |
i understand | i see now | got it | understood | that is interesting | very interesting | fine
by me | that's fine | i agree | right | correct | exactly | true | maybe | whatever | never mind
| nothing | i don't know | go on | continue | next | begin | start | let's go | lets start |
ready | are you ready | i am ready | kk | okey | yess | noo | well | so | oh | ah |
ok ok | ok great | okok | yes yes | yes i do | no i do not | nice | nice nice | lol lol | wow
wow | k thanks no | sure sure | sure why not | hmmm | fine ok | well ok | i see i see | great
stuff | great great
""")

STORIES = _phrases("""\
a story please | tell a story | tell me another story | i want a story | story time | story |
tell me a story about a {noun} | write a story about {noun}s | write a short story | can you
tell me a story | tell me a bedtime story | write me a {quality} story | make up a story | do
you know a story | read me a story | once upon a time
""")

PLACES = _phrases("""\
france | germany | spain | italy | portugal | brazil | canada | india | china | poland | egypt |
the usa | england | russia | norway | sweden | peru | kenya | turkey | mexico | greece | texas |
paris | new york | tokyo | madrid | berlin | rome | vienna | the moon | europe | africa | asia
""")

LANGUAGES = _phrases("""\
spanish | german | italian | english | chinese | japanese | russian | latin | polish | arabic |
portuguese | dutch | hindi | turkish | korean | greek
""")

PROGRAMMING = _phrases("""\
python | java | javascript | rust | c | c++ | go | html | css | sql | bash | typescript | ruby |
php
""")

SUBJECTS = _phrases("""\
physics | gravity | black holes | relativity | evolution | dna | the brain | economics |
inflation | the internet | neural networks | deep learning | transformers | attention | linux |
kubernetes | git | blockchain | bitcoin mining | recursion | python | databases | http | tcp | a
compiler | photosynthesis | climate change | the french revolution | world war 2 | napoleon |
shakespeare | mozart | einstein | newton | love | life | god | death | happiness | freedom |
quantum computers | vaccines | volcanoes | dinosaurs | mars | the sun | music theory | chess |
soccer | cooking | yoga | marketing | machine translation | large language models | gpus
""")

OUTSIDE_REQUESTS = _phrases("""\
tell me a {quality} joke | tell a joke | tell me jokes | tell me another joke | joke | joke
please | a joke please | give me a joke | make me laugh | do you know a joke | say a joke | got
any jokes | tell me a joke about {noun}s | tell me a joke about a {noun} | knock knock | tell me
a riddle | something funny | say something {quality} | say something in {language} | can you
tell me a joke | i want to hear a joke | tell me a funny joke about {subject} | another joke
please | what is the capital of {place} | capital of {place} | whats the capital of {place} |
what's the capital of {place} | tell me the capital of {place} | which city is the capital of
{place} | {place} capital | what is the capital city of {place} | do you know the capital of
{place} | name the capital of {place} | the capital of {place} is | where is {place} | how big
is {place} | how many people live in {place} | what is the population of {place} | what language
do they speak in {place} | who is the president of {place} | who is the king of {place} | who
rules {place} | what to see in {place} | plan a holiday in {place} | flights to {place} | how
far is {place} | i live in {place} | tell me about {place} | how is the weather in {place} |
weather in {place} | weather {place} | weather today | what is the weather | is it raining |
will it rain tomorrow in {place} | what is the time | what time is it in {place} | current time
| what date is it | what year is it | what day is today | todays news | who won the election in
{place} | who won the game | who won the {noun} in 2020 | when did the {noun} end | when was
{subject} discovered | write a {code} function | write a {code} program | write {code} code |
write code | write some code | write a function that {verb}s a {noun} | write a {code} function
to {verb} {noun}s | write me a {code} script that {verb}s the {noun} | give me {code} code for a
{noun} | code a {noun} in {code} | can you write code | can you write {code} | can you program |
code | hello world in {code} | print a {noun} in {code} | how do i {verb} a {noun} in {code} |
fix this {code} code | debug my {code} program | help me with {code} | learn {code} | what does
this {code} code do | explain this code | def {verb}(x): return x | for i in range(10): print(i)
| select {noun} from {noun}s | import {noun} | print('{noun}') | console.log('{noun}') | git
push | sudo ls | ls -la | int main() | write a poem about {noun}s | write a {quality} poem | a
poem about the {noun} | poem please | a haiku about {noun}s | write a haiku | write a song about
the {noun} | write lyrics | sing a song | sing something | write a {noun} essay | write an essay
on {subject} | essay about {subject} | write a letter to my {noun} | write an email about
{subject} | write a {quality} email | write a blog post about {subject} | write a tweet about
{noun}s | write a speech | write a resume | write a {noun} review | write something {quality} |
write me something | translate {noun} to {language} | translate this to {language} | translate
to {language}: the {noun} is {quality} | how do you say {noun} in {language} | what is {noun} in
{language} | translate 'the {quality} {noun}' into {language} | {noun} in {language} | say
{noun} in {language} | summarize this text | summarize {subject} for me | summarise the {noun} |
rewrite this text | correct my grammar | proofread this {noun} | paraphrase this | make this
shorter | what is {subject} | what are {subject} | whats {subject} | explain {subject} | explain
{subject} to me | explain {subject} like i am five | how does {subject} work | how do {noun}s
work | how does a {noun} work | why does the {noun} {verb} | why is the {noun} {quality} | why
are {noun}s {quality} | what is a {noun} | what is the {quality} {noun} | define {noun} | what
does {noun} mean | what is the meaning of {noun} | who is {subject} | who invented the {noun} |
who discovered {subject} | who wrote the {noun} | who painted the {noun} | who was the first
{noun} | how many {noun}s are there | how many {noun}s are in a {noun} | how old is the {noun} |
how tall is the {noun} | how long does a {noun} live | how far is the {noun} | how fast is a
{noun} | what is the biggest {noun} | what is the best {noun} | how hot is the {noun} | how do i
{verb} a {noun} | how to {verb} {noun}s | how can i {verb} better | should i {verb} my {noun} |
can you {verb} | can you {verb} a {noun} | could you {verb} the {noun} | please {verb} the
{noun} | {verb} the {noun} | {verb} a {quality} {noun} | {verb} something | i want to {verb} | i
want a {quality} {noun} | i like {noun}s | my {noun} is {quality} | the {noun} is {quality} |
give me a recipe for {noun} soup | recipe for {noun}s | how do i cook {noun}s | what should i
eat | recommend a {noun} | recommend a {quality} {noun} | what {noun} should i buy | best {noun}
in {place} | give me a {noun} | give me ideas for a {noun} | find a {noun} | search for {noun}s
| open the {noun} | play {noun} | play a song | play chess with me | let us play a game | draw a
{noun} | draw me a {quality} {noun} | make a picture of a {noun} | show me a picture | tell me
something {quality} | tell me something about {subject} | tell me a {noun} fact | a fact about
{noun}s | tell me facts about {subject} | tell me about the {noun} | tell me about {quality}
{noun}s | what do you think of {subject} | what is your opinion on {subject} | do you like
{noun}s | do you like {subject} | do you love {noun}s | do you believe in {subject} | what is
your favourite {noun} | what is your favorite {noun} | whats your favorite food | do you have a
{noun} | do you have friends | do you sleep | do you dream | do you eat | can you feel | can you
think | can you see me | can you love | will you marry me | are you {quality} | you are
{quality} | you are dumb | you suck | you are wrong | you are a {noun} | shut up | i hate you |
i like you | i am {quality} | i feel {quality} | i am happy | i am bored | i am tired | i am
hungry | i miss my {noun} | how old r you | what is your age | when were you born | where do you
live | where are you now | which country are you from | {a} * {b} | {a} x {b} | {a} times {b} |
what is {a} * {b} | {a} / {b} | what is {a} divided by {b} | what is {a} times {b} | square root
of {a} | {a}{b}{a} + {b}{a}{b} | solve {a}x = {b} | x^2 + {a} = {b} | what is pi | {a}% of {b} |
integrate x^2 | 2x + {a} = {b} | {a}{b}{a} | {a} {b} {a} | {noun} | {noun}s | {quality} {noun} |
{quality} | {verb} | {noun} {noun} | {subject} | {place} | {language} | {word} | {word} {word} |
{word} {noun} | {verb} {word} | {word} {word} {word} | what is {word} | who is {word} | tell me
about {word} | explain {word} | where is {word} | how does {word} work | write {word} | what is
the {word} of {word} | how do i {word} | i am {word} | do you know {word} | was ist {word} | was
ist die hauptstadt von {place} | erzahl mir einen witz | raconte moi une blague | cuentame un
chiste | quelle heure est-il | wie spat ist es | que hora es | wie wird das wetter | schreib ein
gedicht | ecris un poeme | 讲个笑话 | 今天天气怎么样 | расскажи анекдот | какая погода |
what is ai | is ai dangerous | will ai take my job | stock price of {word} | is {subject} true |
is {place} {quality} | what is the distance between {place} and {place} | 
compare {noun}s and {noun}s | what is the difference between a {noun} and a {noun} |
{noun} or {noun} | why {verb} | why not |
why | advice about {subject} | give me advice | what should i do today | how do i make money |
how do i learn {language} | teach me {language} | teach me {subject} | help me with my {noun} |
help me write a {noun} | i need a {quality} {noun} | tell me a secret | tell me the truth | tell
me your secret | what happened in 1969 | what happened today | any news | what is new | what is
the tallest {noun} | what is the largest {noun} | what is the speed of a {noun} | what is the
boiling point of {noun} | how much does a {noun} cost | how much is a {noun} |
{digits} | {digits} | {digits} {digits} | {signs} | {signs} | {word} | {word} | what is deep
learning | what is {subject} exactly | what is data science | what is reinforcement learning |
how old is {place} | how old are your parents | how old is the universe | what is your birthday
| where are you located | where were you born | where is your home | what country is that | i
love {noun}s | i love {place} | i love my {noun} | i adore you | do you love {subject} | do you
hate me | do you like me | will you be my friend | you are ugly | you are bad | you are so
{quality} | you are an idiot | you are a fool | you are boring | are you stupid | draw a
{quality} cat | draw a dog | draw something | paint a {noun} | sketch a {noun} | how do i get
fit | how do i gain weight | how do i get rich | how do i sleep better | how do i stop smoking |
how can i be {quality} | write a {code} function that sorts numbers | write a function that adds
two numbers | write a {code} program to sort a list | implement quicksort in {code} | write code
to reverse a string | write a sorting algorithm | write a {code} class | qwerty | qwe | asd |
asdf asdf | asdasd | sdfsdf | jkl | zxcv | fjdksl | lkjhg |
{a} * {b} | {a}*{b} | what is {a} x {b} | whats {a} * {b} | how much is {a} times {b} | {a}
times {b} | what is {b} * {a} | multiply {a} by {b} | divide {b} by {a} | {b} / {a} | {b}/{a}
""")
