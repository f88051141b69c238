from quire.server.protocol.prompts import DetokenizeAnswer, TokenizeAnswer
from tests.server.fake_engine import MESSAGES, MODEL, assert_error, in_loop, make_server, requests_to


@in_loop
async def test_detokenize_inverts_tokenize() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        body = {"model": MODEL, "prompt": "hé", "return_token_strs": True}
        answer = (await client.post("/tokenize", json=body)).json()
        TokenizeAnswer.model_validate(answer)
        assert (answer["count"], answer["tokens"], answer["max_model_len"]) == (3, [104, 195, 169], 128)
        assert answer["token_strs"] == ["h", "Ã", "©"]
        back = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert DetokenizeAnswer.model_validate(back).prompt == "hé"


@in_loop
async def test_tokenized_conversation_has_the_templates_tokens() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        answer = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
        closed = (await client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})).json()
        text = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"]
    assert text == "<user>hi<assistant>"
    assert closed["tokens"] == answer["tokens"][:-1]
    assert answer["token_strs"] is None


@in_loop
async def test_empty_prompt_has_no_tokens() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@in_loop
async def test_refuses_other_models_and_unknown_tokens() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        response = await client.post("/tokenize", json={"model": "other", "prompt": "a"})
        assert_error(response, 404, "model_not_found", "model")
        response = await client.post("/detokenize", json={"tokens": [1, 260]})
        assert_error(response, 400, "invalid_parameter", "tokens.1")
        response = await client.post("/tokenize", json={"prompt": "x" * 1_000_000})
        assert_error(response, 400, "context_length_exceeded")


@in_loop
async def test_tools_are_part_of_a_conversation() -> None:
    app, _ = make_server(num_blocks=2000, max_model_len=2048)
    tool = {"type": "function", "function": {"name": "now", "description": "What time it is"}}
    async with requests_to(app) as client:
        answer = (await client.post("/tokenize", json={"messages": MESSAGES, "tools": [tool]})).json()
        text = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"]
        assert "What time it is" in text
        response = await client.post("/tokenize", json={"prompt": "hi", "tools": [tool]})
        assert_error(response, 400, "invalid_parameter", "tools")
        response = await client.post("/tokenize", json={"messages": MESSAGES, "tools": [tool, tool]})
        assert_error(response, 400, "invalid_parameter", "tools[1].function.name")
